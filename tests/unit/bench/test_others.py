"""How much of the machine others used: processes of this one are none, strangers are."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from soloist.bench.others import Others, others_counted
from soloist.cli.commands.results import warn_of_others
from soloist.device import CoreWatch

_SPIN_S = 0.6
_LOOKS = 5
# Its parent ends at once, so it belongs to nobody here.
_ORPHAN = (
    "import subprocess, sys\n"
    "quiet = {{'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}}\n"
    "print(subprocess.Popen([sys.executable, '-c', {code!r}], **quiet).pid)\n"
)
_COUNT = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


def watched(others: Others, seconds: float = _SPIN_S) -> float:
    time.sleep(seconds)
    others.stop()
    return others.cores


@pytest.mark.timed  # whatever else runs here is an other
def test_processes_of_this_one_are_no_others_and_a_stranger_is() -> None:
    # Of several looks, since another process may begin between any two.
    differences = []
    while len(differences) < _LOOKS and min(differences, default=1.0) > 0.5:
        with others_counted() as others:
            time.sleep(_SPIN_S)
        without = others.cores
        with others_counted(1) as others:
            time.sleep(_SPIN_S)
        differences.append(others.cores - without)
    assert min(differences) <= 0.5, "a process that the measurement started counts as another"
    made = subprocess.run(
        [sys.executable, "-c", _ORPHAN.format(code=_COUNT)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    stranger = int(made.stdout)
    try:
        watch = CoreWatch(_SPIN_S / 2)
        watch.others()
        strange = watched(Others())
        seen = watch.others()
    finally:
        os.kill(stranger, signal.SIGKILL)
    assert strange > 0.3
    assert seen > 0.3


def test_busy_processes_end_with_the_measurement_even_if_it_is_killed() -> None:
    code = (
        "import time, psutil\n"
        "from soloist.bench.others import others_counted\n"
        "with others_counted(1):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        busy = psutil.Process(int(bench.stdout.readline()))
        bench.kill()
    psutil.wait_procs([busy], timeout=20)
    assert not busy.is_running() or busy.status() == psutil.STATUS_ZOMBIE


def test_a_machine_that_was_not_quiet_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Row:
        def __init__(self, others_cores: float | None) -> None:
            self.others_cores = others_cores

    warn_of_others([Row(None), Row(0.04)])  # type: ignore[list-item]
    assert capsys.readouterr().err == ""
    warn_of_others([Row(0.04), Row(0.81)])  # type: ignore[list-item]
    assert "not quiet: other processes used up to 0.81 cores" in capsys.readouterr().err
