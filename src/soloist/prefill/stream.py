"""CUDA streams in which work is recorded, and that nobody else in this process has."""

import threading
import weakref
from collections import defaultdict

import torch

from soloist.errors import LaunchError
from soloist.jit.bindings import driver

_lock = threading.Lock()
_free = defaultdict[torch.device, list[torch.cuda.Stream]](list)


def own_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """A stream that is the owner's as long as it lives; then it is lent again.

    `torch.cuda.Stream` gives out the same 32 streams again and again. Where work is recorded, that
    is not harmless: torch marks the end of pinned memory that is freed by an event in every stream
    that used it, and an event in a stream that is being recorded can never be asked for. The next
    request for pinned memory asks, and fails with "invalid argument".

    The owner is watched, and not the stream: torch frees a CUDA stream's object without telling
    those who watch it (seen in 2.11), and the process crashes at its end.

    Raises LaunchError, CudaMissing.
    """
    with _lock:
        free = _free[device]
        stream = free.pop() if free else _created(device)
    weakref.finalize(owner, free.append, stream)
    return stream


def _created(device: torch.device) -> torch.cuda.Stream:
    found = driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch makes its context, if this is the first use
        status, handle = found.cuStreamCreate(found.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if int(status):
        raise LaunchError(f"making a stream on {device}", f"cuStreamCreate returned {status}")
    return torch.cuda.ExternalStream(int(handle), device)  # type: ignore[no-untyped-call]
