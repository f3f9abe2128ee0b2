"""Of a test with many cases few run by default, the same ones always, the others with `-m slow`."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.mark.few(2)
@pytest.mark.parametrize("case", range(10))
def test_many(case):
    pass

@pytest.mark.few(3)
@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fewer_than_asked_for(case):
    pass
"""


def run(folder: Path, *options: str) -> tuple[list[str], str]:
    """The cases that passed, and the summary."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    passed = re.findall(r"::(\S+) PASSED", done.stdout)
    return passed, done.stdout.splitlines()[-1]


def test_default_and_slow_runs_have_all_cases_between_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "test_cases.py").write_text(CASES, "utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  few(n):\n  slow:\n  gpu:\n  gpus(n):\n", "utf-8"
    )
    default, summary = run(tmp_path)
    assert len(default) == 3
    assert "test_fewer_than_asked_for[1]" in default
    assert "9 skipped" in summary
    assert run(tmp_path)[0] == default, "the same ones every time"
    slow, _ = run(tmp_path, "-m", "slow")
    assert len(slow) == 9
    assert not set(slow) & set(default)
