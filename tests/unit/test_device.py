"""What a process may use, with a made-up control group."""

import sys
from pathlib import Path

import pytest

from soloist import device


def group(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(content)
    return folder


STAT = "anon 700\ninactive_file 200\nactive_file 50\n"


def test_room_is_the_limit_less_what_cannot_be_dropped(tmp_path: Path) -> None:
    room = device._cgroup_room_bytes(group(tmp_path, max="1000\n", current="900\n", stat=STAT))
    assert room == 300


def test_a_full_group_has_no_room(tmp_path: Path) -> None:
    room = device._cgroup_room_bytes(group(tmp_path, max="1000", current="1500", stat=STAT))
    assert room == 0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"max": "max\n", "current": "900\n", "stat": STAT},
        {"max": "1000"},
        {"max": "1000", "current": "many", "stat": STAT},
        {"max": "1000", "current": "900"},
        {"max": "1000", "current": "900", "stat": "no pairs here at all"},
        {"max": "-1", "current": "900", "stat": STAT},
    ],
    ids=["no group", "no limit", "half", "text", "no stat", "odd stat", "negative"],
)
def test_without_a_readable_limit_there_is_none(files: dict[str, str], tmp_path: Path) -> None:
    assert device._cgroup_room_bytes(group(tmp_path, **files)) == sys.maxsize


def test_statistics_without_file_pages_count_none(tmp_path: Path) -> None:
    room = device._cgroup_room_bytes(group(tmp_path, max="1000", current="900", stat="anon 1\n"))
    assert room == 100


def test_the_smaller_of_machine_and_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_CGROUP", group(tmp_path, max="1000", current="900", stat=STAT))
    assert device.available_memory_bytes() == 300
    monkeypatch.setattr(device, "_CGROUP", tmp_path / "absent")
    assert device.available_memory_bytes() > 10**6


def test_at_least_one_core_has_a_name() -> None:
    assert device.usable_cores() >= 1
    assert "core" in device.cpu_name(device.usable_cores())


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("max 100000\n", sys.maxsize),
        ("nonsense", sys.maxsize),
        ("100000 0", sys.maxsize),
        (None, sys.maxsize),
    ],
)
def test_cores_within_the_quota_of_a_group(tmp_path: Path, content: str | None, cores: int) -> None:
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert device._cgroup_cores(tmp_path) == cores


def test_a_quota_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    assert device.usable_cores() == 1


class Machine:
    """Clocks that a test sets: now, what processors did, what this process did, what runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now_s = self.busy_s = self.own_s = 0.0
        self.load = folder / "loadavg"
        self.runs(1)
        monkeypatch.setattr(device, "_LOAD", self.load)
        monkeypatch.setattr(device, "usable_logical_cores", lambda: [0, 1])
        monkeypatch.setattr(device, "busy_seconds", lambda _: self.busy_s)
        monkeypatch.setattr(device.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(device.time, "process_time", lambda: self.own_s)

    def runs(self, num_threads: int) -> None:
        self.load.write_text(f"0.50 0.40 0.30 {num_threads}/321 4567\n")

    def passes(self, seconds: float, others: float, own: float) -> None:
        self.now_s += seconds
        self.busy_s += (others + own) * seconds
        self.own_s += own * seconds


def test_others_are_what_is_busy_without_oneself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    watch = device.CoreWatch(0.1)
    machine.passes(0.1, others=0.75, own=1.2)
    assert watch.others() == pytest.approx(0.75)
    machine.passes(0.05, others=0, own=2)
    assert watch.others() == pytest.approx(0.75), "it is too early to look again"
    machine.passes(0.05, others=0, own=2)
    assert watch.others() == 0
    machine.passes(0.2, others=-0.1, own=0)  # clocks tick at different times
    assert watch.others() == 0


def test_what_was_busy_long_ago_counts_only_if_something_runs_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    watch = device.CoreWatch(0.1)
    machine.passes(9, others=1.0, own=0)
    assert watch.others() == 0
    machine.runs(2)
    machine.passes(9, others=0.9, own=0)
    assert watch.others() == pytest.approx(0.9)
    machine.load.unlink()
    machine.passes(9, others=1.0, own=0)
    assert watch.others() == 0, "nothing tells"
