"""Chunks of a pool's pages as bytes in the host's memory, for a folder, and back.

On CUDA the memory is pinned. Copies to the host run in a stream of their own, beside what the
device computes. The bytes of a chunk are its pages of the first rank, then those of the second, ….
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from soloist.kv.layout import PAGE_POSITIONS

# Copies to the device under way; their memory has to stay.
_MOST_UPLOADS = 4


class PageCopies:
    """Of the pools of all ranks, whose pages have the same numbers.

    Args:
        pools: [pages, …] each, contiguous.
    """

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._pools = [pool.flatten(1) for pool in pools]
        self._is_cuda = pools[0].device.type == "cuda"
        self._streams: list[torch.cuda.Stream] = []
        if self._is_cuda:
            self._streams = [torch.cuda.Stream(pool.device) for pool in pools]  # type: ignore[no-untyped-call]
        self._is_downloading = False
        self._uploads: deque[tuple[list[torch.cuda.Event], memoryview]] = deque()

    def bytes_of(self, num_tokens: int) -> int:
        """Of a chunk of whole pages."""
        page_bytes = sum(pool.shape[1] * pool.element_size() for pool in self._pools)
        return num_tokens // PAGE_POSITIONS * page_bytes

    def buffer(self, num_bytes: int) -> memoryview:
        """Memory that a device copies from quickly; from any thread."""
        made = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return made.numpy().data

    def download(self, pages: Sequence[int]) -> Callable[[], list[memoryview]] | None:
        """Begin to copy pages to the host.

        They may not be overwritten before `settle`.

        Returns:
            Waits for the copy, in any thread, and gives the bytes; None where the machine has no
            memory for them.
        """
        events = list[torch.cuda.Event]()
        try:
            copies = [
                torch.empty((len(pages), p.shape[1]), dtype=p.dtype, pin_memory=self._is_cuda)
                for p in self._pools
            ]
        except RuntimeError:
            return None
        for rank, (pool, copy) in enumerate(zip(self._pools, copies, strict=True)):
            if self._is_cuda:
                stream = self._streams[rank]
                stream.wait_stream(torch.cuda.current_stream(pool.device))
            with torch.cuda.stream(self._streams[rank]) if self._is_cuda else nullcontext():
                for place, page in enumerate(pages):
                    copy[place].copy_(pool[page], non_blocking=self._is_cuda)
                if self._is_cuda:
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(self._streams[rank])
                    events.append(event)
        self._is_downloading = self._is_cuda

        def downloaded() -> list[memoryview]:
            for event in events:
                event.synchronize()
            return [copy.view(torch.uint8).numpy().data for copy in copies]

        return downloaded

    def settle(self) -> None:
        """Whatever the device does from now on may overwrite pages that are being copied."""
        if self._is_downloading:
            for pool, stream in zip(self._pools, self._streams, strict=True):
                torch.cuda.current_stream(pool.device).wait_stream(stream)
            self._is_downloading = False

    def upload(self, data: memoryview, pages: Sequence[int]) -> None:
        """Copy a chunk's bytes to pages; what is queued after this call sees them."""
        if len(self._uploads) == _MOST_UPLOADS:
            for event in self._uploads.popleft()[0]:
                event.synchronize()
        start, events = 0, list[torch.cuda.Event]()
        for pool in self._pools:
            stop = start + len(pages) * pool.shape[1] * pool.element_size()
            part = torch.frombuffer(data[start:stop], dtype=pool.dtype).view(len(pages), -1)
            for place, page in enumerate(pages):
                pool[page].copy_(part[place], non_blocking=self._is_cuda)
            if self._is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(pool.device))
                events.append(event)
            start = stop
        if self._is_cuda:
            self._uploads.append((events, data))
