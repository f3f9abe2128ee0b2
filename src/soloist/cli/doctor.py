"""`soloist doctor`: what this machine has, what runs on it and why not, to paste into an issue."""

import getpass
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from soloist.cli.probes import PROBES, Lines
from soloist.cli.tables import show_facts
from soloist.cli.terminal import print_json
from soloist.cli.verdict import Verdict, judge
from soloist.errors import SoloistError

_LIMIT_S = 30.0
# Names that are no secret, and may be words of something else.
_NO_NAMES = frozenset({"root", "localhost", "user", "linux", "ubuntu", "admin", "python", "cuda"})
_SHORTEST_NAME = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found.

    Attributes:
        lines: for people, by name.
        error: why there are none; empty where there are.
    """

    lines: Lines
    error: str = ""


def show(*, as_json: bool) -> None:
    """Print findings and verdict; exit status 1 where no model can run."""
    found = {name: look(probe) for name, probe in PROBES.items()}
    verdict, error = _judged()
    hide = hider()
    if as_json:
        print_json(
            {
                "probes": {
                    name: {
                        "lines": {key: hide(line) for key, line in f.lines.items()},
                        "error": hide(f.error),
                    }
                    for name, f in found.items()
                },
                "runs": {key: hide(line) for key, line in _verdict_lines(verdict, error).items()},
                "can_run": verdict is not None and verdict.can_run,
            }
        )
    else:
        _show_words(found, _verdict_lines(verdict, error), hide)
    if verdict is None or not verdict.can_run:
        raise typer.Exit(1)


def look(probe: Callable[[], Lines], limit_s: float = _LIMIT_S) -> Finding:
    """Run one probe; its errors and its silence become a finding."""
    done: list[Finding] = []

    def run() -> None:
        try:
            done.append(Finding(probe()))
        except SoloistError as error:
            done.append(Finding({}, error.message))
        except Exception as error:  # noqa: BLE001 - whatever is broken here is what is asked
            done.append(Finding({}, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return done[0] if done else Finding({}, f"no answer within {limit_s:g} s")


def _judged() -> tuple[Verdict | None, str]:
    """The verdict, or why there is none."""
    kept: list[Verdict] = []

    def ask() -> Lines:
        kept.append(judge())
        return {}

    error = look(ask).error
    return (kept[0] if kept and not error else None), error


def _verdict_lines(verdict: Verdict | None, error: str) -> Lines:
    if verdict is None:
        return {"reference": f"no: {error}", "decode kernel": "no: the reference does not run"}
    return verdict.lines


def _show_words(found: Mapping[str, Finding], verdict: Lines, hide: Callable[[str], str]) -> None:
    rows = []
    for name, finding in found.items():
        rows += [(key, hide(_one_line(line))) for key, line in finding.lines.items()]
        if finding.error:
            rows.append((name, hide(_one_line(f"not known: {finding.error}"))))
    show_facts("this machine", rows)
    show_facts("runs here", [(key, hide(_one_line(line))) for key, line in verdict.items()])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def hider() -> Callable[[str], str]:
    """What takes names of user and host, and the home folder's path, out of a text."""
    hidden = [(re.escape(home), "~") for home in _homes()]
    for name, mark in ((_ask(getpass.getuser), "USER"), (_ask(socket.gethostname), "HOST")):
        hidden += [
            (rf"(?<!\w){re.escape(part)}(?!\w)", mark)
            for part in (name, name.partition(".")[0])
            if len(part) >= _SHORTEST_NAME and part.lower() not in _NO_NAMES
        ]

    def hide(text: str) -> str:
        for pattern, mark in hidden:
            text = re.sub(pattern, mark, text)
        return text

    return hide


def _homes() -> list[str]:
    """As it is called, and where it leads."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    found = {str(home), str(home.resolve())}
    return sorted((path for path in found if len(path) > 1), key=len, reverse=True)


def _ask(source: Callable[[], str]) -> str:
    try:
        return source()
    except (OSError, KeyError, ImportError):
        return ""
