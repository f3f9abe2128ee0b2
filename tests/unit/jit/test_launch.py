"""What the driver is asked for when a kernel is launched, on a machine without one."""

import ctypes
from types import SimpleNamespace

import pytest

from soloist.errors import LaunchError
from soloist.jit import module
from soloist.jit.compiler import Cubin, Report
from soloist.jit.module import Module


class Driver:
    """Lists calls; one block fits each of four SMs."""

    CUstream = staticmethod(lambda handle: handle)
    CUlaunchConfig = staticmethod(lambda: SimpleNamespace(attrs=[]))
    CUlaunchAttribute = staticmethod(lambda: SimpleNamespace(value=SimpleNamespace()))
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=0)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=0)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_COOPERATIVE=0)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def cuFuncGetParamInfo(self, _: object, index: int) -> tuple[int, int, int]:  # noqa: N802 - its name
        return index, 0, 4

    def __getattr__(self, name: str):
        def call(*_: object) -> tuple[int, int]:
            self.calls.append(name)
            return 0, 4 if name == "cuDeviceGetAttribute" else 1

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(module, "driver", lambda: driver)
    return driver


def test_a_launch_like_the_last_one_is_only_started(driver: Driver) -> None:
    loaded = Module(Cubin(b"", Report({}, ()), "", "sm_90a"), "decode")
    args = [ctypes.c_int32(0)]
    loaded.launch(4, 128, 96 * 1024, args, 0)
    driver.calls.clear()
    loaded.launch(4, 128, 96 * 1024, args, 0)
    assert driver.calls == ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    with pytest.raises(LaunchError, match="4 fit"):
        loaded.launch(5, 128, 96 * 1024, args, 0)
    driver.calls.clear()
    loaded.launch(4, 128, 96 * 1024, args, 7)
    assert "cuOccupancyMaxActiveBlocksPerMultiprocessor" in driver.calls, "another stream"
