"""What this machine offers: memory and cores that a process may really use."""

import os
import sys
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


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
