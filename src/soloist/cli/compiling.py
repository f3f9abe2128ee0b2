"""`soloist compile`: a model's kernels, compiled before the user's eyes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from soloist.cli.tables import show_table
from soloist.cli.terminal import print_json, status
from soloist.device import usable_cores
from soloist.engine.compiling import CompiledKernel, compile_kernels
from soloist.engine.config import EngineConfig, Precision
from soloist.engine.opening import open_model
from soloist.engine.support import support_of
from soloist.errors import NothingToCompile, SettingError, gigabytes
from soloist.megakernel.gpu import TYPICAL, Gpu, gpu_from_capability
from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from soloist.model.folder import find_model
from soloist.model.kv_format import KvName, kv_format
from soloist.parallel.share import RANKS
from soloist.settings import read_settings
from soloist.weights.choice import Rounding

# More SMs than any chip has.
_MOST_SMS = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What to compile.

    Attributes:
        model: a folder, a hub id or a shipped model.
        revision: on the hub.
        arch: of the GPU; None takes this machine's GPU.
        num_sms: of the GPU; None takes those of a typical one.
        ranks: GPUs that will run the model together.
        output: the cache to fill; None takes this user's.
        precision: in which the model will run.
        rounding: of its weights on loading.
        accepted_fields: of config.json, that nobody knows.
        kv: what keys and values will be stored as; None for the model's precision.
    """

    model: str
    revision: str | None
    arch: str | None
    num_sms: int | None
    ranks: int
    output: Path | None
    precision: Precision
    rounding: Rounding
    accepted_fields: tuple[str, ...]
    kv: KvName | None = None


def checked_ranks(given: str) -> int:
    """How many GPUs, or an error that names the allowed counts."""
    counts = {str(count): count for count in RANKS}
    if given not in counts:
        raise SettingError("--gpus", given, ", ".join(counts))
    return counts[given]


def fill(asked: Asked, *, as_json: bool) -> None:
    """Compile what the cache lacks, and print what it then has of the model.

    Raises:
        UserError: the model or an option cannot be used.
        DeviceError: the kernel does not run the model, or cannot be compiled.
    """
    gpu, folder = _gpu_of(asked), _cache_of(asked)
    plan = _plan_of(asked, gpu)
    status(f"{asked.model} · {plan.dtype.value} · {gpu.arch}, {gpu.num_sms} SMs · {folder}")
    threads = usable_cores()
    kernels = compile_kernels(plan, folder, threads, lambda kernel: status(_line(kernel)))
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "arch": gpu.arch,
                "num_sms": gpu.num_sms,
                "kernels": [asdict(kernel) for kernel in kernels],
            }
        )
        return
    rows = [
        (k.name, "kept" if k.was_kept else f"{k.seconds:.1f} s", gigabytes(k.num_bytes))
        for k in kernels
    ]
    show_table(("kernel", "compiled", "code"), rows)


def _line(kernel: CompiledKernel) -> str:
    return f"{kernel.name}: {'kept' if kernel.was_kept else f'{kernel.seconds:.1f} s'}"


def _gpu_of(asked: Asked) -> Gpu:
    if asked.num_sms is not None and not 1 <= asked.num_sms <= _MOST_SMS:
        raise SettingError("--sms", asked.num_sms, f"1 … {_MOST_SMS}")
    if asked.arch is None:
        gpu = _present()
    elif asked.arch in TYPICAL:
        gpu = TYPICAL[asked.arch]
    else:
        raise SettingError("--arch", asked.arch, ", ".join(TYPICAL))
    return gpu if asked.num_sms is None else replace(gpu, num_sms=asked.num_sms)


def _present() -> Gpu:
    if not torch.cuda.is_available():
        hint = "name the GPU that the kernels are for: this machine has none"
        raise SettingError("--arch", "missing", ", ".join(TYPICAL), hint)
    p = torch.cuda.get_device_properties(0)
    shared_bytes = p.shared_memory_per_block_optin  # type: ignore[attr-defined]  # stubs lack it
    return gpu_from_capability(p.major, p.minor, p.multi_processor_count, shared_bytes)


def _cache_of(asked: Asked) -> Path:
    folder = asked.output.absolute() if asked.output is not None else read_settings().cache
    if folder is None:
        raise SettingError("--output", "missing", "a folder, since this user has no home")
    return folder


def _plan_of(asked: Asked, gpu: Gpu) -> Plan:
    offline = read_settings().hub_offline
    folder = find_model(asked.model, revision=asked.revision, offline=offline)
    config = EngineConfig(
        asked.model,
        precision=asked.precision,
        weights=asked.rounding.layers,
        head_weights=asked.rounding.head,
        accepted_fields=asked.accepted_fields,
    )
    checkpoint, chosen = open_model(folder, config)
    dtype = checkpoint.dtype if asked.precision == "auto" else Dtype(asked.precision)
    kv = kv_format(asked.kv, chosen.config, dtype)
    support = support_of(gpu, chosen.config, dtype, asked.ranks, chosen.stored, kv)
    if support.plan is None:
        raise NothingToCompile(support.refusal.partition(";")[0])
    return support.plan
