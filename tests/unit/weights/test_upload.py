"""Files get to the GPU whole, or those who want them are told that they never will."""

import ctypes
import threading
from pathlib import Path

import pytest

from soloist.weights import upload
from soloist.weights.upload import Upload

SOME = 1 << 40


class Host:
    """A GPU's memory that is not one."""

    def __init__(self, free_bytes: int = SOME, copies: int = 10**9) -> None:
        self._free_bytes, self._copies = free_bytes, copies
        self.buffers: dict[int, ctypes.Array] = {}
        self.gate = threading.Event()
        self.gate.set()

    def enter(self) -> None: ...

    def free_bytes(self) -> int:
        return self._free_bytes

    def allocate(self, num_bytes: int) -> int:
        buffer = (ctypes.c_uint8 * num_bytes)()
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, address: int) -> None:
        del self.buffers[address]

    pinned, free_pinned = allocate, free

    def copy(self, to: int, pinned: int, num_bytes: int) -> None:
        self.gate.wait(30)
        if self._copies == 0:
            raise OSError("out of copies")
        self._copies -= 1
        ctypes.memmove(to, pinned, num_bytes)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(upload, "PIECE_BYTES", 1000)
    made = []
    for number, size in enumerate((12_345, 1000, 1, 0)):
        made.append(tmp_path / str(number))
        made[-1].write_bytes(bytes((number + i * i) % 251 for i in range(size)))
    return made


def test_all_bytes_arrive_and_all_memory_is_given_back(files: list[Path]) -> None:
    memory = Host()
    up = Upload(files, memory, "cuda:0")
    for file in files:
        address = up.address(file)
        assert address is not None
        assert ctypes.string_at(address, file.stat().st_size) == file.read_bytes()
    assert up.address(Path("another")) is None
    assert up.held_bytes() == 13_346
    assert up.ended_s >= up.began_s
    up.close()
    up.close()
    assert not memory.buffers


@pytest.mark.parametrize("memory", [Host(free_bytes=10_000), Host(copies=5)])
def test_what_fails_is_told_and_leaves_nothing(files: list[Path], memory: Host) -> None:
    up = Upload(files, memory, "cuda:0")
    assert up.address(files[0]) is None
    up.close()
    assert not memory.buffers


def test_a_file_that_shrinks_is_not_there(files: list[Path]) -> None:
    memory = Host()
    memory.gate.clear()  # four readers have a piece each; the file is cut before they want another
    up = Upload(files[:1], memory, "cuda:0")
    up.held_bytes()
    files[0].write_bytes(b"short")
    memory.gate.set()
    assert up.address(files[0]) is None
    up.close()
    assert not memory.buffers


def test_closing_ends_what_runs(files: list[Path]) -> None:
    memory = Host()
    memory.gate.clear()
    up = Upload(files, memory, "cuda:0")
    closer = threading.Thread(target=up.close)
    closer.start()
    assert up.address(files[0]) is None
    memory.gate.set()
    closer.join(30)
    assert not closer.is_alive()
    assert not memory.buffers


@pytest.mark.parametrize(("free_bytes", "arrives"), [(8 * 13_346, False), (9 * 13_346, True)])
def test_numbers_of_quantised_files_have_to_fit(
    files: list[Path], free_bytes: int, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_OTHERS_BYTES", 0)
    up = Upload(files, Host(free_bytes), "cuda:0", growth=4)
    assert (up.address(files[0]) is not None) is arrives
    up.close()
