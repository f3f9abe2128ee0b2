"""The command line in this process: arguments in, exit status and both streams out."""

import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from soloist.cli import main
from soloist.model.folder import shipped_folder


@dataclass
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def soloist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Run `soloist` with these arguments and, if given, this on stdin."""

    def run(*arguments: object, stdin: bytes | None = None) -> Outcome:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit_:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(exit_.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def etude(tmp_path: Path) -> Path:
    """A copy of the shipped draft model, to be damaged."""
    return Path(shutil.copytree(shipped_folder("etude-draft"), tmp_path / "model"))
