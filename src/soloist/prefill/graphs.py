"""Passes that are recorded as CUDA graphs.

Up to some hundred tokens launching takes longer than computing, and where we have no attention of
our own a full first chunk has the faster one that is slow to set up.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from soloist.prefill.elementwise import Chunk
from soloist.prefill.stream import own_stream


class Graphs:
    """Recorded passes of one rank.

    Args:
        device: whose memory they share.

    Attributes:
        by_rows: the graphs of a pass in their order, by its number of rows.
        of_short_prompts: the same of passes over `Chunk.is_short_prompt`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_rows: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self.of_short_prompts: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._recorder: torch.cuda.Stream | None = None

    def has(self, chunk: Chunk) -> bool:
        """Whether a pass over as many rows of this kind was recorded."""
        return chunk.num_rows in self._like(chunk)

    def record(self, chunk: Chunk, parts: Iterator[None]) -> None:
        """Record a pass that has run once, a graph for each of its parts.

        Nothing else that happens in the process ends the recording: other threads may allocate and
        free GPU memory (`thread_local`), and this one collects no garbage.
        """
        torch.cuda.synchronize(self._device)
        graphs: list[torch.cuda.CUDAGraph] = []
        memory = next((some[0].pool() for some in self._all()), None)
        is_over = False
        with torch.cuda.device(self._device), _garbage_kept():
            if self._recorder is None:
                self._recorder = own_stream(self, self._device)
            while not is_over:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, memory, self._recorder, capture_error_mode="thread_local"
                ):
                    is_over = next(parts, True) is not None
                graphs.append(graph)
                memory = graph.pool()
        self._like(chunk)[chunk.num_rows] = graphs

    def replay(self, chunk: Chunk) -> Iterator[None]:
        """Queue a recorded pass; stops where other ranks should get their next graph, too."""
        for graph in self._like(chunk)[chunk.num_rows]:
            graph.replay()
            yield

    def replay_all(self) -> None:
        """Queue every recorded pass."""
        for graphs in self._all():
            for graph in graphs:
                graph.replay()

    def _like(self, chunk: Chunk) -> dict[int, list[torch.cuda.CUDAGraph]]:
        return self.of_short_prompts if chunk.is_short_prompt else self.by_rows

    def _all(self) -> Iterator[list[torch.cuda.CUDAGraph]]:
        yield from self.by_rows.values()
        yield from self.of_short_prompts.values()


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect no garbage meanwhile.

    An engine that is gone is garbage with cycles. It frees its GPU memory whenever the collector
    finds it, and CUDA forbids that in a thread that is recording.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
