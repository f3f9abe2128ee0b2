"""Memory that a process and all its descendants have taken. Pure: no torch.

Pages that processes share since a fork count once; files that are mapped, such as libraries and
weights, do not count: the system takes them back whenever it likes.
"""

import contextlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from soloist.errors import SettingError

_TAKEN = re.compile(r"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB$", re.MULTILINE)
# Looking for new processes walks all of the machine's: 2 ms.
_READINGS_BETWEEN_SEARCHES = 5
# An exact reading walks page tables, 12 ms for 500 MB: too much for every 20 ms beside a server.
# Between two of them resident pages are counted, in 0.03 ms, which does not show that a page is no
# longer shared.
_READINGS_BETWEEN_EXACT_ONES = 25
_EXACT_AGAIN = 1.05


class TreeMemory:
    """Readings of one process and its descendants.

    Args:
        pid: of the process.

    Raises:
        SettingError: there is no such process, or its memory may not be read.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
            _taken_bytes(self._root)
        except (psutil.Error, OSError, ValueError) as error:
            told = "a process of this machine whose memory this user may read"
            raise SettingError("--pid", pid, told, str(error)) from error
        self._tree: list[psutil.Process] = []
        self._readings = 0
        self._exact_bytes = self._counted_bytes = 0

    @property
    def name(self) -> str:
        """Of the process, and its PID."""
        return f"{self._root.name()} {self._root.pid}"

    def read_exactly(self) -> int:
        """Bytes taken now; 0 once the process has ended."""
        self._search()
        self._counted_bytes = sum(map(_resident_bytes, self._tree))
        self._exact_bytes = sum(map(_taken_bytes_or_none, self._tree))
        return self._exact_bytes

    def read(self) -> int:
        """The same, quicker: what the last exact reading gave and what was added since.

        Where that is more by a twentieth, or there are other processes, it is an exact reading; and
        so is every 25th.
        """
        self._readings += 1
        if self._readings % _READINGS_BETWEEN_EXACT_ONES == 0:
            return self.read_exactly()
        if self._readings % _READINGS_BETWEEN_SEARCHES == 0:
            before = self._tree
            self._search()
            if before != self._tree:
                return self.read_exactly()
        counted = sum(map(_resident_bytes, self._tree))
        if not counted:
            return 0
        added = counted - self._counted_bytes
        if self._exact_bytes + added > self._exact_bytes * _EXACT_AGAIN:
            return self.read_exactly()
        return self._exact_bytes + added

    def _search(self) -> None:
        try:
            self._tree = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            self._tree = []


def _taken_bytes(process: psutil.Process) -> int:
    """Of one process: its part of anonymous and shared memory, swapped pages included."""
    if not psutil.LINUX:
        return int(process.memory_full_info().uss)
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(map(int, _TAKEN.findall(text))) * 1024


def _taken_bytes_or_none(process: psutil.Process) -> int:
    """The same; 0 of a process that has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        return _taken_bytes(process)
    return 0


def _resident_bytes(process: psutil.Process) -> int:
    """Of one process: its resident pages but for those of files; 0 if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        found = process.memory_info()
        return int(found.rss - getattr(found, "shared", 0))
    return 0


def listener(url: str) -> int:
    """The PID of the process of this machine that listens on a URL's port.

    Raises:
        SettingError: none can be seen.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            is_it = one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
            if is_it and one.pid:
                return one.pid
    raise SettingError(
        "--pid", "auto", f"a server of this machine on port {port}", "name its PID instead"
    )
