"""Wake a GPU while Python imports: the driver takes a third of a second to make a context."""

import ctypes
import threading


def wake(device: str) -> threading.Thread | None:
    """Start making the context that everybody in this process will use, beside what follows.

    Nothing depends on it: where there is no GPU or no driver, those who need one say so.

    Args:
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'; anything else is refused elsewhere.

    Returns:
        The thread that does it; None where no GPU is wanted.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdecimal():
        return None
    thread = threading.Thread(target=_make_context, args=(int(number or 0),), daemon=True)
    thread.start()
    return thread


def _make_context(ordinal: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # calls through ctypes let others run meanwhile
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), ordinal) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
