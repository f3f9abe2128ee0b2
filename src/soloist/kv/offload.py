"""Pages of a pool in the host's memory, and the copies there and back.

On CUDA the memory is pinned, and copies run in a stream of their own, beside what the device
computes in the current one. A page is one contiguous piece of the pool.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

# Memory is pinned in pieces, when it is first needed: all at once would take seconds.
_PIECE_BYTES = 64 * 2**20
# Fetches under way: one runs while the next is queued. More would only make others wait.
_MOST_FETCHES = 2


class HostPages:
    """Copies of pages, numbered from 0.

    Args:
        pool: [pages, …], contiguous.
        budget_bytes: of host memory, at most.

    Attributes:
        num_pages: how many fit.
    """

    def __init__(self, pool: Tensor, budget_bytes: int) -> None:
        self._pool = pool.flatten(1)
        page_bytes = self._pool.shape[1] * pool.element_size()
        # Pinned memory comes in powers of two.
        self._piece_bytes = max(_PIECE_BYTES, 1 << (page_bytes - 1).bit_length())
        self._piece_pages = self._piece_bytes // page_bytes
        self.num_pages = budget_bytes // self._piece_bytes * self._piece_pages
        self._pieces: list[Tensor] = []
        self._is_cuda = pool.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._fetches: deque[torch.cuda.Event] = deque()
        self._is_fetching = False

    @property
    def num_bytes(self) -> int:
        """Host memory that was taken so far."""
        return len(self._pieces) * self._piece_bytes

    def offload(self, pages: Sequence[int], host_pages: Sequence[int]) -> bool:
        """Copy to the host; what is queued after this call may overwrite `pages`.

        Returns False, and copies nothing, where the machine has no more memory to give.
        """
        if not self._grow(max(host_pages)):
            return False
        self._copy([(self._host(h), self._pool[p]) for p, h in zip(pages, host_pages, strict=True)])
        self._wait_for_copies()
        return True

    def fetch(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Begin to copy back; `join` comes before `pages` are used.

        Waits while two earlier fetches are under way.
        """
        if len(self._fetches) == _MOST_FETCHES:
            self._fetches.popleft().synchronize()
        self._copy([(self._pool[p], self._host(h)) for p, h in zip(pages, host_pages, strict=True)])
        self._is_fetching = True
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._fetches.append(event)

    def join(self) -> None:
        """What is queued after this call sees all that was fetched."""
        if self._is_fetching:
            self._wait_for_copies()

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Queue copies (to, from) behind everything that was queued so far."""
        if self._stream is None:
            for to, source in pairs:
                to.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def _wait_for_copies(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)
        self._is_fetching = False

    def _host(self, page: int) -> Tensor:
        piece, index = divmod(page, self._piece_pages)
        return self._pieces[piece][index]

    def _grow(self, page: int) -> bool:
        while len(self._pieces) * self._piece_pages <= page:
            try:
                piece = torch.empty(
                    self._piece_bytes // self._pool.element_size(),
                    dtype=self._pool.dtype,
                    pin_memory=self._is_cuda,
                )
            except RuntimeError:
                return False
            values = self._pool.shape[1]
            self._pieces.append(piece[: self._piece_pages * values].view(-1, values))
        return True


class HostPagesOfRanks:
    """The same for the pools of all ranks, whose pages have the same numbers.

    Args:
        parts: one for each rank.

    Attributes:
        num_pages: how many fit.
    """

    def __init__(self, parts: Sequence[HostPages]) -> None:
        self._parts = list(parts)
        self.num_pages = min(part.num_pages for part in parts)

    def offload(self, pages: Sequence[int], host_pages: Sequence[int]) -> bool:
        """See HostPages; what only some ranks could copy counts for nothing."""
        return all(part.offload(pages, host_pages) for part in self._parts)

    def fetch(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """See HostPages."""
        for part in self._parts:
            part.fetch(host_pages, pages)

    def join(self) -> None:
        """See HostPages."""
        for part in self._parts:
            part.join()
