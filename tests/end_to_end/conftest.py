"""The command line in this process: arguments in, exit status and both streams out."""

import io
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
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
) -> Iterator[Callable[..., Outcome]]:
    """Run `soloist` with these arguments and, if given, this on stdin."""

    def run(*arguments: object, stdin: bytes | None = None) -> Outcome:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        words = [str(a) for a in arguments]
        monkeypatch.setattr(sys, "argv", ["soloist", *words])  # result rows name the command
        with pytest.raises(SystemExit) as exit_:
            main(words)
        captured = capsys.readouterr()
        return Outcome(exit_.value.code or 0, captured.out, captured.err)

    # Serving sets up what is logged, in this process as well.
    loggers = [logging.getLogger(name) for name in ("soloist", "uvicorn.error")]
    before = [(logger, logger.level, [*logger.handlers]) for logger in loggers]
    yield run
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def etude(tmp_path: Path) -> Path:
    """A copy of the shipped draft model, to be damaged."""
    return Path(shutil.copytree(shipped_folder("etude-draft"), tmp_path / "model"))
