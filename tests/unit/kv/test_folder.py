"""Files of saved chunks: what is written comes back, and nothing else ever does."""

import os
import random
import stat
import time
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest

from soloist.kv.folder import ChunkFolder, Damaged, Link, links

OURS, OTHERS = b"o" * 16, b"x" * 16
SIZE = 1000


def chain(count: int, seed: int = 0) -> list[Link]:
    rng = random.Random(seed)
    return list(links([[rng.randrange(50_000) for _ in range(8)] for _ in range(count)]))


def data_of(link: Link) -> bytes:
    return random.Random(link.key).randbytes(SIZE)


def write(folder: ChunkFolder, link: Link) -> int:
    data = data_of(link)
    return folder.write(link, [memoryview(data[:300]), memoryview(data[300:])])


def read(folder: ChunkFolder, link: Link, size: int = SIZE) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if folder.read(link, memoryview(into)) else None


def aged(folder: ChunkFolder, link: Link, age_s: float) -> None:
    at = time.time() - age_s
    os.utime(folder.path(link), (at, at))


def test_what_is_written_is_read_by_another(tmp_path: Path) -> None:
    one, two = chain(2)
    folder = ChunkFolder(tmp_path, OURS)
    assert read(folder, one) is None
    assert write(folder, one) == folder.path(one).stat().st_size
    later = ChunkFolder(tmp_path, OURS)
    assert later.has(one)
    assert not later.has(two)
    assert read(later, one) == data_of(one)
    assert read(ChunkFolder(tmp_path, OTHERS), one) is None, "of another model"


def test_nobody_else_may_read_prompts(tmp_path: Path) -> None:
    folder, (link,) = ChunkFolder(tmp_path, OURS), chain(1)
    before = os.umask(0)
    try:
        write(folder, link)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path(link).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path(link).parent.stat().st_mode) == 0o700


def test_the_same_tokens_elsewhere_are_another_chunk() -> None:
    first, again = links([(1, 2), (1, 2)])
    (other,) = links([(1, 3)])
    assert len({first.key, again.key, other.key}) == 3
    assert again.parent == first.key


@pytest.mark.parametrize("place", [0, 3, 10, 30, 50, 60, 70, 80, 90, 104, 500, -1])
def test_one_wrong_bit_is_never_used(tmp_path: Path, place: int) -> None:
    folder, (link,) = ChunkFolder(tmp_path, OURS), chain(1)
    write(folder, link)
    content = bytearray(folder.path(link).read_bytes())
    content[place] ^= 4
    folder.path(link).write_bytes(content)
    with pytest.raises(Damaged, match=r"\.kv: it"):
        read(folder, link)
    assert not folder.has(link), "it is deleted"
    assert read(folder, link) is None
    write(folder, link)
    assert read(folder, link) == data_of(link)


@pytest.mark.parametrize("length", [0, 7, 83, 84, 90, 120, 1000])
def test_what_is_cut_off_is_never_used(tmp_path: Path, length: int) -> None:
    folder, (link,) = ChunkFolder(tmp_path, OURS), chain(1)
    write(folder, link)
    os.truncate(folder.path(link), length)
    with pytest.raises(Damaged, match="cut off"):
        read(folder, link)
    assert not folder.has(link)


def test_a_file_in_anothers_place_is_never_used(tmp_path: Path) -> None:
    folder, other, (one, two) = ChunkFolder(tmp_path, OURS), ChunkFolder(tmp_path, OTHERS), chain(2)
    write(folder, one)
    write(other, one)
    folder.path(one).rename(folder.path(two))
    with pytest.raises(Damaged, match="another chunk"):
        read(folder, two)
    other.path(one).rename(folder.path(one))
    with pytest.raises(Damaged, match="another model"):
        read(folder, one)
    write(folder, one)
    with pytest.raises(Damaged, match="1,001 are wanted"):
        read(folder, one, SIZE + 1)


def test_a_file_that_cannot_be_read_stays(tmp_path: Path) -> None:
    folder, (link,) = ChunkFolder(tmp_path, OURS), chain(1)
    folder.path(link).mkdir(parents=True)  # the superuser of a test may read every file
    assert read(folder, link) is None
    assert folder.path(link).is_dir()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    folder, (link,) = ChunkFolder(tmp_path, OURS), chain(1)
    written = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) > 500:
            raise OSError(28, "No space left on device")
        return written(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write(folder, link)
    assert list(folder.path(link).parent.iterdir()) == []


def test_the_least_recently_used_go_first_and_ends_before_beginnings(tmp_path: Path) -> None:
    folder, other = ChunkFolder(tmp_path, OURS), ChunkFolder(tmp_path, OTHERS)
    old, new, theirs = chain(3, 1), chain(3, 2), chain(2, 3)
    for age_s, (where, path) in enumerate([(folder, new), (other, theirs), (folder, old)]):
        for link in path:
            size = write(where, link)
            aged(where, link, 100.0 * age_s + 50)
    assert folder.make_room(0, 8 * size) == (8 * size, 0)
    # Its beginning is as old as before; its end was used just now.
    aged(folder, old[2], 0)
    left, deleted = folder.make_room(size, 8 * size)
    assert (left, deleted) == (6 * size, 2)
    assert all(folder.has(link) for link in [*old, *new])
    assert not any(other.has(link) for link in theirs)
    left, deleted = folder.make_room(size, 5 * size)
    assert (left, deleted) == (3 * size, 3)
    assert all(folder.has(link) for link in old)
    folder.make_room(size, 3 * size)
    assert [folder.has(link) for link in old] == [True, False, False]


def test_only_files_of_this_form_are_deleted(tmp_path: Path) -> None:
    folder, (link,) = ChunkFolder(tmp_path, OURS), chain(1)
    write(folder, link)
    mine = [tmp_path / "letters.txt", folder.path(link).parent / "letters.txt"]
    left, running = (folder.path(link).parent / f".part-{n}-0" for n in (1, 2))
    for file in (*mine, left, running):
        file.write_bytes(b"x" * 99)
    os.utime(left, (0, 0))
    assert folder.make_room(0, 1) == (0, 1)
    assert [file.exists() for file in (*mine, left, running)] == [True, True, False, True]


def test_a_touched_end_keeps_its_beginning(tmp_path: Path) -> None:
    folder, one, two = ChunkFolder(tmp_path, OURS), chain(2, 1), chain(2, 2)
    for link in (*one, *two):
        size = write(folder, link)
        aged(folder, link, 500 if link in one else 100)
    folder.touch(one[-1])
    folder.make_room(0, 2 * size + size // 2)
    assert [folder.has(link) for link in (*one, *two)] == [True, True, False, False]


def race(root: Path, seed: int) -> int:
    """Write, read and delete beside others; how many reads found a file."""
    folder, rng, found = ChunkFolder(root, OURS), random.Random(seed), 0
    everything = chain(12)
    for _ in range(300):
        link = rng.choice(everything)
        if rng.random() < 0.5:
            write(folder, link)
        elif (data := read(folder, link)) is not None:
            assert data == data_of(link)
            found += 1
        if rng.random() < 0.1:
            folder.make_room(0, 6 * 1200)
    return found


def test_processes_share_a_folder_without_locks(tmp_path: Path) -> None:
    with get_context("spawn").Pool(3) as pool:
        found = pool.starmap(race, [(tmp_path, seed) for seed in range(3)])
    assert all(count > 20 for count in found)
    folder = ChunkFolder(tmp_path, OURS)
    assert not [f for f in folder.path(chain(1)[0]).parent.iterdir() if f.suffix != ".kv"]


def test_a_chain_is_one_of_tokens() -> None:
    whole = chain(4)
    assert all(later.parent == sooner.key for sooner, later in pairwise(whole))
    assert whole[0].parent == bytes(16)
