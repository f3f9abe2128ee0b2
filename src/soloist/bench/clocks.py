"""What a GPU's clocks did while something was measured, from the driver's NVML. Pure: no torch.

Where NVML is absent, or does not know the GPU, nothing is said. Readings are taken by a thread of
its own, some tens a second, which leaves the thread that measures alone.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from soloist.bench.rows import Clocks, Spread

_EVERY_S = 0.05
# Bits of NVML's clock event reasons that slow a GPU down; idling and settings of its user do not.
_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a GPU: clocks in MHz, degrees Celsius, watts, and NVML's bits of reasons."""

    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    reasons: int


class Watch:
    """Readings so far.

    Args:
        look: takes one; None where nothing can be read.
    """

    def __init__(self, look: Callable[[], Reading] | None) -> None:
        self._look = look
        self._readings: list[Reading] = []

    def look(self) -> None:
        """Take a reading, if the GPU can be read."""
        if self._look is not None:
            self._readings.append(self._look())

    @property
    def can_look(self) -> bool:
        """There is something to read."""
        return self._look is not None

    @property
    def clocks(self) -> Clocks | None:
        """All readings together; None where there are none."""
        seen = list(self._readings)
        if not seen:
            return None
        bits = 0
        for reading in seen:
            bits |= reading.reasons
        return Clocks(
            sm_mhz=Spread.of([r.sm_mhz for r in seen], 0),
            memory_mhz=Spread.of([r.memory_mhz for r in seen], 0),
            temperature_c=Spread.of([r.temperature_c for r in seen], 0),
            power_w=Spread.of([r.power_w for r in seen], 0),
            throttling=tuple(name for bit, name in _REASONS.items() if bits & bit),
            readings=len(seen),
        )


@contextmanager
def watching(uuid: str | None) -> Iterator[Watch]:
    """Read a GPU's clocks from now on, at once, every now and then, and at the end.

    Args:
        uuid: as NVML names the GPU, 'GPU-…'; None for a device that has no clocks to read.
    """
    nvml = None if uuid is None else _nvml()
    look = None if nvml is None or uuid is None else _reader(nvml, uuid)
    watch, is_over = Watch(look), threading.Event()

    def keep_looking() -> None:
        while not is_over.wait(_EVERY_S):
            watch.look()

    watch.look()
    thread = threading.Thread(target=keep_looking, name="clocks", daemon=True)
    if watch.can_look:
        thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        if watch.can_look:
            thread.join()
            watch.look()
        if nvml is not None:
            nvml.nvmlShutdown()


def _nvml() -> Any:  # noqa: ANN401 - a module without types
    """The library, ready to be asked; None where there is no driver with it."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _reader(nvml: Any, uuid: str) -> Callable[[], Reading] | None:  # noqa: ANN401
    """Takes readings of one GPU; None where NVML cannot."""

    def read() -> Reading:
        return Reading(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            reasons=nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )

    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        read()
    except nvml.NVMLError:
        return None
    return read
