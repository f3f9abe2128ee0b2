"""Wake a GPU while Python imports: the driver takes a third of a second to make a context."""

import ctypes
import threading


def driver() -> ctypes.CDLL | None:
    """The driver, if this machine has one; calls through it let other threads run meanwhile."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def wanted_gpu(device: str) -> int | None:
    """Which GPU a device's name may mean; None where it means none.

    Args:
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'; anything else is refused elsewhere.
    """
    kind, _, number = device.partition(":")
    is_gpu = kind in ("auto", "cuda") and (number or "0").isdecimal()
    return int(number or 0) if is_gpu else None


def wake(device: str) -> threading.Thread | None:
    """Start making the context that everybody in this process will use, beside what follows.

    Nothing depends on it: where there is no GPU or no driver, those who need one say so.

    Args:
        device: as of `wanted_gpu`.

    Returns:
        The thread that does it; None where no GPU is wanted.
    """
    if (ordinal := wanted_gpu(device)) is None:
        return None
    thread = threading.Thread(target=_make_context, args=(ordinal,), daemon=True)
    thread.start()
    return thread


def _make_context(ordinal: int) -> None:
    if (found := driver()) is None:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if found.cuInit(0) == 0 and found.cuDeviceGet(ctypes.byref(handle), ordinal) == 0:
        found.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
