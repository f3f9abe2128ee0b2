"""Files on their way into a GPU's memory, beside whatever Python does meanwhile.

Importing torch takes longer than reading a model of a few GB. So threads read pieces of the files
into pinned buffers and copy them on, in system calls and calls of the driver through ctypes, which
let other threads run. Nothing depends on it: where it fails, whoever wants the bytes reads files.
"""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from soloist.jit.wake import driver

PIECE_BYTES = 32 << 20
READERS = 4

# What stays free for those who make tensors of the bytes: copies in two more orders, and the rest.
_COPIES = 2
_OTHERS_BYTES = 4 << 30


class Memory(Protocol):
    """Where files go. Raises OSError for whatever does not work."""

    def enter(self) -> None:
        """Called by each thread before it uses the others."""
        ...

    def free_bytes(self) -> int:
        """Memory that can be allocated."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """The address of new memory."""
        ...

    def free(self, address: int) -> None:
        """Give it back."""
        ...

    def pinned(self, num_bytes: int) -> int:
        """The address of new host memory that copies quickly."""
        ...

    def free_pinned(self, address: int) -> None:
        """Give it back."""
        ...

    def copy(self, to: int, pinned: int, num_bytes: int) -> None:
        """Copy from pinned memory and wait for it."""
        ...


class GpuMemory:
    """Memory of one GPU, in the context that everybody in this process uses.

    Args:
        ordinal: which GPU.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def enter(self) -> None:
        """See Memory; makes the context if it is not there yet."""
        found = driver()
        if found is None:
            raise OSError("this machine has no driver")
        self._driver = found
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), self._ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def free_bytes(self) -> int:
        """See Memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, num_bytes: int) -> int:
        """See Memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        """See Memory."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned(self, num_bytes: int) -> int:
        """See Memory."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), 0)
        assert address.value is not None
        return address.value

    def free_pinned(self, address: int) -> None:
        """See Memory."""
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def copy(self, to: int, pinned: int, num_bytes: int) -> None:
        """See Memory."""
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(to), ctypes.c_void_p(pinned),
            ctypes.c_size_t(num_bytes),
        )  # fmt: skip

    def _call(self, name: str, *values: object) -> None:
        if status := getattr(self._driver, name)(*values):
            raise OSError(f"{name} returned {status}")


@dataclass(frozen=True, slots=True)
class _Piece:
    file: Path
    start: int
    end: int


class Upload:
    """Whole files, on their way or there.

    Args:
        files: what to read, in this order.
        memory: where to.
        device: what torch calls it.
        growth: bytes that become of one, at most, when tensors are made of them.

    Attributes:
        began_s: on the clock of `time.perf_counter`.
        ended_s: likewise, when the last bytes so far had landed.
    """

    def __init__(
        self, files: Sequence[Path], memory: Memory, device: str, *, growth: int = 1
    ) -> None:
        self._memory, self.device, self._growth = memory, device, growth
        self._sizes = {file: file.stat().st_size for file in files}
        self.began_s = self.ended_s = time.perf_counter()
        self._pieces = [
            _Piece(file, start, min(start + PIECE_BYTES, size))
            for file, size in self._sizes.items()
            for start in range(0, size, PIECE_BYTES)
        ]
        self._next = 0
        self._missing = {file: -(-size // PIECE_BYTES) for file, size in self._sizes.items()}
        self._addresses: dict[Path, int] = {}
        self._failed = self._closed = False
        self._changed = threading.Condition()
        self._readers: list[threading.Thread] = []
        self._opener = threading.Thread(target=self._begin, daemon=True)
        self._opener.start()

    def address(self, file: Path) -> int | None:
        """Where a file's bytes are, once all of them are there; None where they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._missing.get(file, 0) == 0)
            return None if self._failed else self._addresses.get(file)

    def held_bytes(self) -> int:
        """How much of the memory it takes until it is closed."""
        self._opener.join()
        return sum(self._sizes[file] for file in self._addresses)

    def close(self) -> None:
        """End what still runs and give the memory back; nobody may use it any more."""
        with self._changed:
            self._closed = self._failed = True
            self._changed.notify_all()
        self._opener.join()
        for reader in self._readers:
            reader.join()
        if not self._addresses:
            return
        self._memory.enter()
        while self._addresses:
            self._memory.free(self._addresses.popitem()[1])

    def _begin(self) -> None:
        try:
            self._memory.enter()
            self._allocate()
        except OSError:
            return self._give_up()
        for _ in range(min(READERS, len(self._pieces))):
            reader = threading.Thread(target=self._read, daemon=True)
            self._readers.append(reader)
            reader.start()
        return None

    def _allocate(self) -> None:
        factor = 1 + _COPIES * self._growth
        if self._memory.free_bytes() < factor * sum(self._sizes.values()) + _OTHERS_BYTES:
            raise OSError("too little memory for the files beside what is made of them")
        for file, size in self._sizes.items():
            self._addresses[file] = self._memory.allocate(max(size, 1))

    def _give_up(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            self._memory.enter()
            buffer = self._memory.pinned(PIECE_BYTES)
            try:
                while (piece := self._take()) is not None:
                    self._move(piece, buffer)
            finally:
                self._memory.free_pinned(buffer)
        except OSError:
            self._give_up()

    def _take(self) -> _Piece | None:
        with self._changed:
            if self._closed or self._failed or self._next == len(self._pieces):
                return None
            self._next += 1
            return self._pieces[self._next - 1]

    def _move(self, piece: _Piece, buffer: int) -> None:
        count = piece.end - piece.start
        view = memoryview((ctypes.c_uint8 * count).from_address(buffer)).cast("B")
        handle = os.open(piece.file, os.O_RDONLY)
        try:
            done = 0
            while done < count:
                read = os.preadv(handle, [view[done:]], piece.start + done)
                if read == 0:
                    raise OSError(f"{piece.file} has become shorter")
                done += read
        finally:
            os.close(handle)
        self._memory.copy(self._addresses[piece.file] + piece.start, buffer, count)
        with self._changed:
            self._missing[piece.file] -= 1
            self.ended_s = time.perf_counter()
            self._changed.notify_all()
