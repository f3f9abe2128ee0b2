"""Passes that are recorded, beside what else happens in the process."""

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from soloist.jit.bindings import driver
from soloist.prefill import stream
from soloist.prefill.elementwise import Chunk
from soloist.prefill.graphs import Graphs

# As many as torch has, and more: whoever asks for one then gets one that somebody had before.
MANY_STREAMS = 64

CHUNK = cast("Chunk", SimpleNamespace(num_rows=32, is_short_prompt=False))


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

    graphs = Graphs(device)
    graphs.record(CHUNK, parts())
    lent = [torch.full((4,), i, pin_memory=True) for i in range(2 * MANY_STREAMS)]

    values.zero_()
    assert sum(1 for _ in graphs.replay(CHUNK)) == 2
    assert values.tolist() == [2] * 4
    assert [tensor[0].item() for tensor in lent] == list(range(2 * MANY_STREAMS))


class Owner:
    """Has GPU memory, and is garbage that only the collector finds."""

    def __init__(self, freed: list[int]) -> None:
        self._itself, self._freed = self, freed
        self._address = _allocated()

    def __del__(self) -> None:
        self._freed.append(_free(self._address))


def _allocated() -> int:
    status, address = driver().cuMemAlloc(1 << 20)
    assert int(status) == 0
    return int(address)


def _free(address: int) -> int:
    return int(driver().cuMemFree(address)[0])


def _by_another_thread() -> Callable[[], None]:
    def allocate_and_free() -> None:
        torch.cuda.set_device(0)
        statuses.append(_free(_allocated()))

    def run() -> None:
        thread = threading.Thread(target=allocate_and_free)
        thread.start()
        thread.join()
        assert statuses == [0]

    statuses: list[int] = []
    return run


def _by_the_collector() -> Callable[[], None]:
    def run() -> None:
        cycles: list[list[object]] = []
        for _ in range(10 * gc.get_threshold()[0]):  # so many new objects make it run
            cycles.append([])
            cycles[-1].append(cycles[-1])
        assert freed in ([], [0])

    freed: list[int] = []
    gc.collect()  # or the owner would be older than what the collector looks at
    Owner(freed)
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("freeing", [_by_another_thread, _by_the_collector])
def test_memory_that_is_freed_while_a_pass_is_recorded_does_not_end_the_recording(
    freeing: Callable[[], Callable[[], None]],
) -> None:
    device = torch.device("cuda", 0)
    values = torch.zeros(4, device=device)
    free = freeing()

    def parts() -> Iterator[None]:
        values.add_(1)
        free()
        yield
        values.mul_(2)

    graphs = Graphs(device)
    graphs.record(CHUNK, parts())
    assert gc.isenabled()
    values.zero_()
    assert sum(1 for _ in graphs.replay(CHUNK)) == 2
    assert values.tolist() == [2] * 4


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
