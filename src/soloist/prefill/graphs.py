"""Passes that are recorded as CUDA graphs.

Up to some hundred tokens launching takes longer than computing, and where we have no attention of
our own a full first chunk has the faster one that is slow to set up.
"""

from collections.abc import Iterator

import torch


class Graphs:
    """Recorded passes of one rank.

    Args:
        device: whose memory they share.

    Attributes:
        by_rows: the graphs of a pass in their order, by its number of rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_rows: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._recorder: torch.cuda.Stream | None = None

    def record(self, rows: int, parts: Iterator[None]) -> None:
        """Record a pass that has run once, a graph for each of its parts."""
        torch.cuda.synchronize(self._device)
        graphs: list[torch.cuda.CUDAGraph] = []
        memory = next(iter(self.by_rows.values()))[0].pool() if self.by_rows else None
        is_over = False
        with torch.cuda.device(self._device):
            if self._recorder is None:
                self._recorder = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            while not is_over:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=self._recorder):
                    is_over = next(parts, True) is not None
                graphs.append(graph)
                memory = graph.pool()
        self.by_rows[rows] = graphs

    def replay(self, rows: int) -> Iterator[None]:
        """Queue a recorded pass; stops where other ranks should get their next graph, too."""
        for graph in self.by_rows[rows]:
            graph.replay()
            yield

    def replay_all(self) -> None:
        """Queue every recorded pass."""
        for graphs in self.by_rows.values():
            for graph in graphs:
                graph.replay()
