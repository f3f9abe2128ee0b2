"""A CUDA stream that nobody else in this process has."""

import weakref

import torch

from soloist.errors import LaunchError
from soloist.jit.bindings import driver


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream for one caller; it is destroyed with the object.

    `torch.cuda.Stream` gives out the same 32 streams again and again. Where work is recorded, that
    is not harmless: torch marks the end of pinned memory that is freed by an event in every stream
    that used it, and an event in a stream that is being recorded can never be asked for. The next
    request for pinned memory asks, and fails with "invalid argument".

    Raises LaunchError, CudaMissing.
    """
    found = driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch makes its context, if this is the first use
        status, handle = found.cuStreamCreate(found.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if int(status):
        raise LaunchError(f"making a stream on {device}", f"cuStreamCreate returned {status}")
    stream = torch.cuda.ExternalStream(int(handle), device)  # type: ignore[no-untyped-call]
    weakref.finalize(stream, found.cuStreamDestroy, handle).atexit = False
    return stream
