"""Let GPUs of one process store to each other's memory."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from soloist.errors import LaunchError, NoPeerAccess
from soloist.jit.bindings import driver


def allow_access(devices: Sequence[int]) -> None:
    """Map the memory of each of these GPUs into all others; again does no harm.

    Raises:
        NoPeerAccess: some of them cannot reach each other; the message has the largest group that
            can.
        LaunchError: the driver refuses.
    """
    call = _calls(f"access between GPUs {list(devices)}")
    call("cuInit", 0)
    handles = {number: call("cuDeviceGet", number) for number in devices}
    require_access(
        devices, lambda a, b: bool(call("cuDeviceCanAccessPeer", handles[a], handles[b]))
    )
    contexts = [call("cuDevicePrimaryCtxRetain", handle) for handle in handles.values()]
    for own in contexts:
        call("cuCtxPushCurrent", own)
        for other in contexts:
            if other is not own:
                call("cuCtxEnablePeerAccess", other, 0)
        call("cuCtxPopCurrent")


def can_access(own: int, other: int) -> bool:
    """Whether the first GPU can use the second one's memory.

    Raises:
        LaunchError: the driver does not say.
    """
    call = _calls(f"access of GPU {own} to GPU {other}")
    call("cuInit", 0)
    handles = [call("cuDeviceGet", number) for number in (own, other)]
    return bool(call("cuDeviceCanAccessPeer", *handles))


def _calls(what: str) -> Callable[..., Any]:
    """The driver's functions by name; that access is given already is no failure."""
    api = driver()

    def call(function: str, *args: object) -> Any:  # noqa: ANN401 - the bindings have no types
        result, *values = getattr(api, function)(*args)
        if int(result) not in (0, int(api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)):
            name = api.cuGetErrorName(result)[1].decode()
            raise LaunchError(what, f"{function}: {name}")
        return values[0] if values else None

    return call


def require_access(devices: Sequence[int], reaches: Callable[[int, int], bool]) -> None:
    """Refuse GPUs that do not all reach each other.

    Args:
        devices: their numbers.
        reaches: whether the first one can use the second one's memory.

    Raises NoPeerAccess.
    """
    group = largest_group(devices, reaches)
    if len(group) < len(devices):
        raise NoPeerAccess(list(devices), group)


def largest_group(devices: Sequence[int], reaches: Callable[[int, int], bool]) -> list[int]:
    """The most of these GPUs that all reach each other; the first such group."""
    for count in range(len(devices), 1, -1):
        for group in combinations(devices, count):
            if all(reaches(a, b) and reaches(b, a) for a, b in combinations(group, 2)):
                return list(group)
    return list(devices[:1])
