"""What this machine offers a model, asked of the driver: torch need not work, or be there."""

from dataclasses import dataclass
from typing import Any

from soloist.device import available_memory_bytes
from soloist.errors import CudaMissing, gigabytes
from soloist.jit.bindings import driver


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, in the driver's figures.

    Attributes:
        name: the driver's.
        capability: compute capability.
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that one block may take.
        memory_bytes: of the whole card.
        free_bytes: of it; None where nobody tells.
        bus: its PCI address.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int
    memory_bytes: int
    free_bytes: int | None
    bus: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The first GPU, or none, and the host's memory.

    Attributes:
        card: on which a model runs by default.
        free_bytes: of the host's memory.
    """

    card: Card | None
    free_bytes: int

    @property
    def room_bytes(self) -> int:
        """What a model may take where it runs by default."""
        if self.card is None:
            return self.free_bytes
        free = self.card.free_bytes
        return self.card.memory_bytes if free is None else free

    @property
    def in_words(self) -> str:
        """One line."""
        host = f"{gigabytes(self.free_bytes)} of memory free"
        if self.card is None:
            return f"this machine: no GPU · {host}"
        free = "" if self.card.free_bytes is None else f", {gigabytes(self.card.free_bytes)} free"
        return f"this machine: {self.card.name}, {gigabytes(self.card.memory_bytes)}{free} · {host}"


def read_machine() -> Machine:
    """The first GPU, if there is one that a driver shows."""
    try:
        cards = read_cards()
    except CudaMissing:
        cards = []
    return Machine(cards[0] if cards else None, available_memory_bytes())


def read_cards() -> list[Card]:
    """All GPUs that this process may use, in CUDA's order; none where the driver shows none.

    Raises:
        CudaMissing: the driver or its binding is absent.
    """
    api = driver()

    def ask(function: str, *arguments: object) -> Any:  # noqa: ANN401 - the bindings have no types
        result, *values = getattr(api, function)(*arguments)
        if int(result) != 0:
            raise CudaMissing("a usable NVIDIA driver", f"{function}: error {int(result)}", "")
        return values[0] if values else None

    kinds = api.CUdevice_attribute
    try:
        ask("cuInit", 0)
    except CudaMissing:
        return []  # a driver without a GPU
    cards = []
    for number in range(ask("cuDeviceGetCount")):
        device = ask("cuDeviceGet", number)

        def figure(name: str, device: object = device) -> int:
            kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(ask("cuDeviceGetAttribute", kind, device))

        bus = _text(ask("cuDeviceGetPCIBusId", 32, device))
        cards.append(
            Card(
                name=_text(ask("cuDeviceGetName", 128, device)),
                capability=(
                    figure("COMPUTE_CAPABILITY_MAJOR"), figure("COMPUTE_CAPABILITY_MINOR"),
                ),
                num_sms=figure("MULTIPROCESSOR_COUNT"),
                shared_bytes=figure("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
                memory_bytes=int(ask("cuDeviceTotalMem", device)),
                free_bytes=_free_bytes(bus),
                bus=bus,
            )
        )  # fmt: skip
    return cards


def _text(given: bytes) -> str:
    return given.split(b"\0")[0].decode()


def _free_bytes(bus: str) -> int | None:
    """By NVML, which needs no context on the GPU."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:
        return None
