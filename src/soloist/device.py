"""What this machine offers: memory and cores that a process may really use."""

import os
import sys
import time
from pathlib import Path

import psutil

# What a process needs besides a model: interpreter, torch, tokenizer, allocator slack, workspaces
# of libraries (cuBLAS keeps 34 MB on Hopper for each stream that it multiplies on).
HEADROOM_BYTES = 300 * 10**6

_CGROUP = Path("/sys/fs/cgroup")
_LOAD = Path("/proc/loadavg")

# A look that is longer ago than so many intervals tells little of now.
_RECENT_LOOKS = 3


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, within a container's limit if there is one."""
    return min(int(psutil.virtual_memory().available), _cgroup_room_bytes(_CGROUP))


def _cgroup_room_bytes(group: Path) -> int:
    """Room below the limit of a version 2 control group; cached file pages count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return sys.maxsize
    if not limit.isdecimal():
        return sys.maxsize
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def usable_cores() -> int:
    """Physical cores this process may run on: hyper-threads only get in each other's way."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False)
    return max(1, min(allowed or 1, physical or allowed or 1, _cgroup_cores(_CGROUP)))


def _cgroup_cores(group: Path) -> int:
    """Whole cores' worth of time that a version 2 control group grants, at least one."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # no group, or no limit ("max")
        return sys.maxsize


def cpu_name(threads: int) -> str:
    """The processor's name for people, with the cores that `threads` keep busy."""
    name = "CPU"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = " ".join(line.split(":", 1)[1].split())
                break
    except OSError:
        pass
    return f"{name}, {threads} core{'s' * (threads > 1)}"


class CoreWatch:
    """How many cores other processes keep busy, of those that this process may use.

    Args:
        every_s: how often it looks; clocks of processors tick a hundred times a second.
    """

    def __init__(self, every_s: float = 0.1) -> None:
        self._every_s = every_s
        self._cores = usable_logical_cores()
        self._others = 0.0
        self._seen = self._look()

    @property
    def num_cores(self) -> int:
        """Logical cores that this process may use."""
        return len(self._cores)

    def others(self) -> float:
        """Cores busy for others between the last two looks; looks again where it is time to.

        Where the last look is long ago, what was busy then may be over: only what runs right now
        counts, as far as the system tells.
        """
        before_s, before_used_s = self._seen
        took_s = time.perf_counter() - before_s
        if took_s >= self._every_s:
            self._seen = self._look()
            used = (self._seen[1] - before_used_s) / took_s
            most = float(self.num_cores)
            if took_s > _RECENT_LOOKS * self._every_s:
                most = min(most, _others_running(_LOAD))
            self._others = min(most, max(0.0, used))
        return self._others

    def _look(self) -> tuple[float, float]:
        """Now, and the seconds that others were busy, from any beginning."""
        return time.perf_counter(), busy_seconds(self._cores) - time.process_time()


def _others_running(load: Path) -> int:
    """Threads on the machine that run right now, without the calling one; 0 if nothing tells."""
    try:
        running, _, _ = load.read_text().split()[3].partition("/")
        return max(0, int(running) - 1)
    except (OSError, ValueError, IndexError):
        return 0


def usable_logical_cores() -> list[int]:
    """Numbers of the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def busy_seconds(cores: list[int]) -> float:
    """Time that these logical cores were busy since the machine started, for whomever.

    Time that a host took from a virtual machine counts.
    """
    everyone = psutil.cpu_times(percpu=True)
    # A guest's time is in its user's already; names differ between systems.
    names = ("user", "nice", "system", "irq", "softirq", "steal", "interrupt", "dpc")
    seen = [everyone[core] for core in cores if core < len(everyone)]
    return sum(getattr(times, name, 0.0) for times in seen for name in names)
