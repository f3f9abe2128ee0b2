"""Pages on the host: what goes there comes back, wherever it comes to lie."""

import random
import time

import pytest
import torch

from soloist.kv.offload import HostPages

PIECE = 64 * 2**20


def pool(num_pages: int, values: int, device: str = "cpu") -> torch.Tensor:
    pages = torch.arange(num_pages * values, dtype=torch.float32, device=device)
    return pages.view(num_pages, 2, values // 2)


def test_pages_come_back_wherever_they_lay() -> None:
    pages = pool(6, 8)
    before = pages.clone()
    host = HostPages(pages, PIECE)
    assert host.offload([4, 1, 3], [0, 2, 7])
    pages[[1, 3, 4]] = -1
    host.fetch([7, 0], [1, 5])
    host.join()
    assert torch.equal(pages[1], before[3])
    assert torch.equal(pages[5], before[4])
    assert torch.equal(pages[[0, 2]], before[[0, 2]])
    assert (pages[[3, 4]] == -1).all()


def test_memory_is_taken_when_it_is_needed_and_never_more_than_allowed() -> None:
    values = 4 * 2**20  # pages of 16 MiB
    pages = pool(2, values)
    host = HostPages(pages, 3 * PIECE - 1)
    assert host.num_pages == 8, "two pieces of four pages"
    assert host.num_bytes == 0
    assert host.offload([0], [3])
    assert host.num_bytes == PIECE
    assert host.offload([1], [4])
    assert host.num_bytes == 2 * PIECE
    pages.zero_()
    host.fetch([4, 3], [0, 1])
    assert pages[0, 0, 0] == values
    assert pages[1, 0, 1] == 1


@pytest.mark.parametrize("budget", [0, PIECE - 1])
def test_less_than_a_piece_holds_nothing(budget: int) -> None:
    assert HostPages(pool(2, 8), budget).num_pages == 0


def test_a_machine_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pool(2, 8)
    host = HostPages(pages, PIECE)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    assert not host.offload([0], [0])
    monkeypatch.undo()
    assert host.offload([0], [0])


@pytest.mark.gpu
def test_copies_run_beside_the_current_stream_and_in_order() -> None:
    """Random offloads, fetches and writes; big pages, so that an order that is missing shows."""
    rng = random.Random(0)
    pages = pool(16, 2**20, "cuda")
    host = HostPages(pages, 4 * PIECE)
    on_device = {page: float(page) for page in range(16)}
    on_host: dict[int, float] = {}
    pages.copy_(torch.arange(16.0, device="cuda")[:, None, None].expand_as(pages))
    for number in range(300):
        some = rng.sample(range(16), 4)
        if rng.random() < 0.5 or len(on_host) < 4:
            to = rng.sample(range(host.num_pages), 4)
            assert host.offload(some, to)
            on_host.update(zip(to, [on_device[page] for page in some], strict=True))
            for page in some:  # overwritten at once
                pages[page] = on_device[page] = 1000.0 + number
        else:
            source = rng.sample(sorted(on_host), 4)
            host.fetch(source, some)
            on_device.update(zip(some, [on_host[page] for page in source], strict=True))
            if rng.random() < 0.5:
                host.join()
                assert [pages[page].mean().item() for page in some] == [
                    on_device[page] for page in some
                ]
    host.join()
    assert pages.flatten(1).amin(1).tolist() == [on_device[page] for page in range(16)]
    assert pages.flatten(1).amax(1).tolist() == [on_device[page] for page in range(16)]


@pytest.mark.gpu
@pytest.mark.timed
def test_pages_come_back_at_the_links_speed() -> None:
    """A block of four pages at a time takes hardly longer than one copy of as many bytes."""
    values, count = 2**20, 64  # pages of 4 MiB, as of a 2B model
    pages = torch.randn(count, 2, values // 2, device="cuda")
    host = HostPages(pages, 8 * PIECE)
    assert host.offload(range(count), range(count))
    plain = torch.empty(pages.shape, pin_memory=True)

    def copied() -> None:
        pages.copy_(plain, non_blocking=True)

    def fetched() -> None:
        for first in range(0, count, 4):
            block = range(first, first + 4)
            host.fetch(block, block)
        host.join()

    took_s = {}
    for bring in (copied, fetched) * 5:
        torch.cuda.synchronize()
        start = time.perf_counter()
        bring()
        torch.cuda.synchronize()
        took_s[bring] = min(took_s.get(bring, 1.0), time.perf_counter() - start)
    assert took_s[fetched] < 1.25 * took_s[copied]
