"""Clocks beside rows, as a fake NVML tells them."""

# ruff: noqa: N802 - the functions are NVML's

import time
from types import SimpleNamespace

import pytest

from soloist.bench import clocks
from soloist.bench.clocks import watching


class FakeNvml(SimpleNamespace):
    """One GPU, whose clock falls by 10 MHz each time it is looked at."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(looks=0, was_shut=False)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid != b"GPU-1":
            raise self.NVMLError
        return "handle"

    def nvmlDeviceGetClockInfo(self, _handle: str, kind: int) -> int:
        self.looks += kind == self.NVML_CLOCK_SM
        return 1980 - 10 * self.looks if kind == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetTemperature(self, *_: object) -> int:
        return 60

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        return 412_345

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:
        # Idle and the application's clocks slow nothing down; the power cap only once.
        return 0x1 | 0x2 | (0x4 if self.looks == 3 else 0)

    def nvmlShutdown(self) -> None:
        self.was_shut = True


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(clocks, "_nvml", lambda: fake)
    return fake


def test_readings_from_start_to_end(nvml: FakeNvml) -> None:
    with watching("GPU-1") as watch:
        deadline = time.monotonic() + 30
        while nvml.looks < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    seen = watch.clocks
    assert seen is not None
    assert nvml.was_shut
    # The first look only tries whether the GPU can be read.
    assert seen.readings == nvml.looks - 1 >= 4
    assert (seen.sm_mhz.max, seen.sm_mhz.min) == (1960, 1980 - 10 * nvml.looks)
    assert (seen.memory_mhz.median, seen.temperature_c.median, seen.power_w.max) == (3201, 60, 412)
    assert seen.throttling == ("software power cap",)


@pytest.mark.usefixtures("nvml")
def test_even_the_shortest_measurement_is_seen_at_both_ends() -> None:
    with watching("GPU-1") as watch:
        pass
    assert watch.clocks is not None
    assert watch.clocks.readings >= 2


@pytest.mark.parametrize("uuid", [None, "GPU-2"])
def test_devices_without_clocks(nvml: FakeNvml, uuid: str | None) -> None:
    with watching(uuid) as watch:
        watch.look()
    assert watch.clocks is None
    assert nvml.looks == 0
    assert nvml.was_shut is (uuid is not None)


def test_a_machine_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_nvml", lambda: None)
    with watching("GPU-1") as watch:
        pass
    assert watch.clocks is None
