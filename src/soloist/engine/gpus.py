"""Which GPUs run a model together, and what each of them has to hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from soloist.engine.config import EngineConfig, GpuCount
from soloist.engine.support import Support, find_support
from soloist.errors import DeviceMissing, GpusMissing, NoPeerAccess, RanksUnsupported, SettingError
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat
from soloist.model.quantized import Quantized
from soloist.parallel.peers import can_access, largest_group
from soloist.parallel.share import RANKS, share_of

_COUNTS = ", ".join(map(str, RANKS))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a model run.

    Attributes:
        devices: of each rank; one that appears more than once is shared.
    """

    devices: tuple[torch.device, ...]

    @property
    def ranks(self) -> int:
        """How many."""
        return len(self.devices)

    @property
    def num_gpus(self) -> int:
        """0 on a CPU."""
        return len({device for device in self.devices if device.type == "cuda"})

    @property
    def sharing(self) -> int:
        """How many ranks the fullest device has."""
        return max(map(self.devices.count, self.devices))

    def support(
        self,
        config: ModelConfig,
        dtype: Dtype,
        stored: Mapping[str, Quantized] | None = None,
        kv: KvFormat | None = None,
    ) -> Support:
        """What the decode kernel makes of a model here; only it knows ranks.

        `stored` has its quantised matrices by name; `kv` says how keys and values are stored.

        Raises:
            RanksUnsupported: it does not run the model on several.
            KvUnsupported: it would, but for `kv`.
        """
        on = self.devices[0], self.ranks, self.sharing
        found = find_support(config, dtype, *on, stored, kv)
        if found.plan is None and self.ranks > 1:
            raise RanksUnsupported(self.ranks, found.refusal.partition(";")[0], [1])
        return found

    def share_of(self, config: ModelConfig) -> ModelConfig:
        """What one device has to hold of a model: a rank's share, and all rows of the embedding."""
        if self.ranks == 1:
            return config
        return replace(share_of(config, self.ranks), vocab_size=config.vocab_size)

    def free_bytes(self) -> int:
        """What each rank may take."""
        return min(torch.cuda.mem_get_info(d)[0] // self.devices.count(d) for d in self.devices)


def place(
    asked: EngineConfig, device: torch.device, config: ModelConfig, dtype: Dtype
) -> Placement:
    """Where a model's ranks run: on `device` alone, or on it and others.

    Raises:
        SettingError: a number of GPUs that is none of those allowed, or none with this device.
        GpusMissing, NoPeerAccess: the machine has not so many that can work together.
        RanksUnsupported: the model cannot be spread over so many.
    """
    if asked.rank_devices:
        return _as_told(asked.rank_devices)
    is_named = ":" in asked.device
    if device.type != "cuda" or is_named:
        if asked.gpus not in (1, "auto"):
            where = f"with --device {asked.device}" if is_named else "without a GPU"
            raise SettingError("--gpus", asked.gpus, f"1 or auto {where}")
        return Placement((device,))
    if asked.gpus == 1:
        return Placement((device,))

    def refusal(ranks: int) -> str:
        return find_support(config, dtype, device, ranks).refusal.partition(";")[0]

    first = device.index or 0
    kind = _kind(first)
    alike = [n for n in range(torch.cuda.device_count()) if _kind(n) == kind]
    chosen = choose_gpus(asked.gpus, alike, can_access, refusal)
    return Placement(tuple(torch.device("cuda", n) for n in chosen))


def _as_told(numbers: Sequence[int]) -> Placement:
    if len(numbers) not in RANKS:
        raise SettingError("rank_devices", tuple(numbers), f"GPU numbers, {_COUNTS} of them")
    present = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    for number in numbers:
        if not 0 <= number < len(present):
            raise DeviceMissing(f"cuda:{number}", present or ["cpu"])
    return Placement(tuple(torch.device("cuda", n) for n in numbers))


def _kind(number: int) -> tuple[str, int]:
    p = torch.cuda.get_device_properties(number)
    return p.name, p.multi_processor_count


def choose_gpus(
    asked: GpuCount,
    alike: Sequence[int],
    reaches: Callable[[int, int], bool],
    refusal: Callable[[int], str],
) -> list[int]:
    """Numbers of the GPUs that run a model together.

    Args:
        asked: how many, or 'auto'.
        alike: GPUs of one kind.
        reaches: whether the first one can use the second one's memory.
        refusal: why the model cannot be spread over so many; empty where it can.

    Raises: as `place`.
    """
    if asked == "auto":
        group = largest_group(alike, reaches)
        fine = [n for n in RANKS if n <= len(group) and not refusal(n)]
        return group[: max(fine, default=1)]
    if asked not in RANKS:
        raise SettingError("--gpus", asked, f"{_COUNTS}, auto")
    if asked > len(alike):
        raise GpusMissing(asked, list(alike))
    group = largest_group(alike, reaches)
    if asked > len(group):
        raise NoPeerAccess(list(alike), group)
    if reason := refusal(asked):
        raise RanksUnsupported(asked, reason, [n for n in RANKS if not refusal(n)])
    return group[:asked]
