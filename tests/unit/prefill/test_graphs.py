"""Passes that are recorded, beside what else happens in the process."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from soloist.prefill import stream
from soloist.prefill.elementwise import Chunk
from soloist.prefill.graphs import Graphs

# As many as torch has, and more: whoever asks for one then gets one that somebody had before.
MANY_STREAMS = 64


@pytest.mark.gpu
def test_pinned_memory_that_is_freed_while_a_pass_is_recorded_is_lent_again() -> None:
    device = torch.device("cuda", 0)
    values, staged = torch.zeros(4, device=device), list[Tensor]()
    for _ in range(MANY_STREAMS):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            staged.append(torch.ones(4, pin_memory=True))
            values.copy_(staged[-1], non_blocking=True)

    def parts() -> Iterator[None]:
        values.add_(1)
        yield
        staged.clear()  # as the garbage collector does with what belonged to another engine
        values.mul_(2)

    chunk = cast("Chunk", SimpleNamespace(num_rows=32, is_short_prompt=False))
    graphs = Graphs(device)
    graphs.record(chunk, parts())
    lent = [torch.full((4,), i, pin_memory=True) for i in range(2 * MANY_STREAMS)]

    values.zero_()
    assert sum(1 for _ in graphs.replay(chunk)) == 2
    assert values.tolist() == [2] * 4
    assert [tensor[0].item() for tensor in lent] == list(range(2 * MANY_STREAMS))


def test_a_stream_of_its_own_is_lent_again_when_its_owner_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = iter(range(3))
    monkeypatch.setattr(stream, "_created", lambda device: (device, next(made)))
    here, there = torch.device("cuda", 40), torch.device("cuda", 41)
    first, second, other = Graphs(here), Graphs(here), Graphs(there)
    assert stream.own_stream(first, here) == (here, 0)
    assert stream.own_stream(second, here) == (here, 1)
    assert stream.own_stream(other, there) == (there, 2)
    del first
    gc.collect()
    assert stream.own_stream(second, here) == (here, 0)
