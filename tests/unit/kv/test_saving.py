"""What is saved beside the work: nobody waits, and nothing is saved that would not be found."""

import errno
import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from soloist.kv import saving
from soloist.kv.chunks import PrefixChunks
from soloist.kv.folder import ChunkFolder
from soloist.kv.saving import SavedChunks, Source, Trail

CHUNKS = PrefixChunks(8, 8)
SIZE = 500


def saved_in(root: Path, most_bytes: int = 10**6) -> SavedChunks:
    return SavedChunks(ChunkFolder(root, b"o" * 16), most_bytes, CHUNKS, lambda _: SIZE)


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(99) for _ in range(count)]


def data_at(trail: Trail, start: int) -> bytes:
    return random.Random(trail[start].key).randbytes(SIZE)


def source(trail: Trail, start: int) -> Source:
    return lambda: [memoryview(data_at(trail, start))]


def save(saved: SavedChunks, ids: Sequence[int]) -> Trail:
    trail = saved.trail(ids, 0)
    for start in trail.between(0, len(ids)):
        saved.save(trail, start, lambda start=start: source(trail, start))
    return trail


def loaded(saved: SavedChunks, ids: Sequence[int]) -> int:
    """How many tokens are found, each with its bytes."""
    trail, start = saved.trail(ids, 0), 0
    while (data := saved.load(trail, start)) is not None:
        assert bytes(data) == data_at(trail, start)
        start += 8
    assert not trail.ahead
    return start


def test_a_later_process_finds_what_was_saved(tmp_path: Path) -> None:
    first, ids = saved_in(tmp_path), prompt(85)
    save(first, ids)
    assert first.flush(10)
    assert first.counts.saved == 80
    later = saved_in(tmp_path)
    assert loaded(later, ids) == 80
    assert loaded(later, [*ids[:50], *prompt(40, 1)]) == 48
    assert loaded(later, ids[:48]) == 40, "the last token is read again"
    assert loaded(later, prompt(85, 2)) == 0
    counts = later.counts
    assert (counts.loaded, counts.asked) == (168, 84 + 89 + 47 + 84)
    assert later.flush(10)
    assert counts.num_bytes == sum(f.stat().st_size for f in tmp_path.glob("*/*.kv"))


def test_a_damaged_file_is_told_deleted_and_written_anew(tmp_path: Path, caplog) -> None:
    first, ids = saved_in(tmp_path), prompt(80)
    trail = save(first, ids)
    assert first.flush(10)
    file = first.folder.path(trail[24])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    later = saved_in(tmp_path)
    with caplog.at_level(logging.WARNING, "soloist"):
        assert loaded(later, ids) == 24
    assert later.counts.damaged == 1
    assert str(file) in caplog.text
    assert not file.exists()
    save(later, ids)
    assert later.flush(10)
    assert later.counts.saved == 8, "of the others nothing is written twice"
    assert loaded(later, ids) == 72


def test_a_full_disk_is_told_once_and_tried_again_later(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    saved, ids = saved_in(tmp_path), prompt(80)
    real, is_full, tries = ChunkFolder.write, True, 0

    def write(*args) -> int:
        nonlocal tries
        tries += 1
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(ChunkFolder, "write", write)
    with caplog.at_level(logging.WARNING, "soloist"):
        save(saved, ids)
        assert saved.flush(10)
        save(saved, prompt(80, 1))
        assert saved.flush(10)
    assert tries == 1
    assert caplog.text.count("the disk is full") == 1
    assert (saved.counts.saved, saved.counts.dropped) == (0, 160)
    is_full = False
    monkeypatch.setattr(saving, "_PAUSE_S", 0.0)
    saved._paused_until = 0.0
    save(saved, ids)
    assert saved.flush(10)
    assert loaded(saved, ids) == 72


def test_behind_what_was_not_saved_nothing_is(tmp_path: Path, monkeypatch) -> None:
    saved, ids = saved_in(tmp_path), prompt(80)
    real, calls = ChunkFolder.write, 0
    monkeypatch.setattr(saving, "_PAUSE_S", 0.0)

    def write(*args) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    monkeypatch.setattr(ChunkFolder, "write", write)
    save(saved, ids)
    assert saved.flush(10)
    assert len(list(tmp_path.glob("*/*.kv"))) == 2
    # What the memory has is saved as soon as a request uses it.
    trail = saved.trail(ids, 80)
    saved.catch_up(trail, 80, lambda start: source(trail, start))
    assert saved.flush(10)
    assert trail.saved_to == 80
    assert loaded(saved, ids) == 72


def test_nobody_waits_for_a_slow_drive(tmp_path: Path, monkeypatch) -> None:
    saved, ids, go = saved_in(tmp_path), prompt(80), threading.Event()
    real = ChunkFolder.write

    def write(*args) -> int:
        go.wait(20)
        return real(*args)

    monkeypatch.setattr(ChunkFolder, "write", write)
    monkeypatch.setattr(saving, "MOST_WAITING_BYTES", 3 * SIZE)
    trail = save(saved, ids)  # returns
    assert trail.saved_to == 24
    assert saved.counts.dropped == 56
    assert not saved.flush(0)
    go.set()
    assert saved.flush(10)
    assert loaded(saved, ids) == 24


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    saved, bound = saved_in(tmp_path, 8000), 8000
    for seed in range(12):
        save(saved, prompt(24, seed))
        assert saved.flush(10)
        held = sum(f.stat().st_size for f in tmp_path.glob("*/*.kv"))
        assert held <= bound
        assert saved.counts.num_bytes == held
        assert loaded(saved, [*prompt(24, seed), 1]) == 24, "the latest is there"
    assert saved.counts.evicted > 10
    small = saved_in(tmp_path / "small", SIZE - 1)
    save(small, prompt(24))
    assert small.flush(10)
    assert (small.counts.saved, small.counts.dropped) == (0, 24)


def test_servers_that_share_a_folder_find_each_others_prompts(tmp_path: Path) -> None:
    one, two, ids = saved_in(tmp_path), saved_in(tmp_path), prompt(80)
    save(one, ids)
    assert one.flush(10)
    assert loaded(two, ids) == 72
    save(two, ids)
    assert two.flush(10)
    assert two.counts.saved == 0


def test_a_failure_of_one_chunk_does_not_end_the_writer(tmp_path: Path) -> None:
    saved, ids = saved_in(tmp_path), prompt(16)
    trail = saved.trail(ids, 0)

    def broken() -> list[memoryview]:
        raise RuntimeError("the device is lost")

    saved.save(trail, 0, lambda: broken)
    assert saved.flush(10)
    save(saved, prompt(16, 1))
    assert saved.flush(10)
    assert saved.counts.saved == 16


def test_nothing_holds_what_is_not_used_any_more(tmp_path: Path) -> None:
    saved, ids = saved_in(tmp_path), prompt(16)
    save(saved, ids)
    assert saved.flush(10)
    assert loaded(saved, ids) == 8
    assert saved.flush(10)
    gone = weakref.ref(saved)
    del saved
    until = time.monotonic() + 10  # its threads end by themselves
    while gone() is not None and time.monotonic() < until:
        gc.collect()
    assert gone() is None


@pytest.mark.parametrize("bound", [5000, 10**6])
def test_what_is_used_stays(tmp_path: Path, bound: int) -> None:
    saved, ids = saved_in(tmp_path, bound), prompt(25)
    save(saved, ids)
    for seed in range(1, 9):
        save(saved, prompt(24, seed))
        assert saved.flush(10)
        trail = saved.trail(ids, 24)
        saved.catch_up(trail, 24, lambda start, trail=trail: source(trail, start))
        assert saved.flush(10)
    assert loaded(saved, ids) == 24
