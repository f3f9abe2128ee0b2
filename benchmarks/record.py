"""Record result files: `python benchmarks/record.py cpu` or `h200`, from the repository's root.

Runs every command of `suites.py` in turn and writes `results/`. What a command measured is kept in
a folder of parts, so that a run that was interrupted goes on where it stopped; a file is replaced
once all of its commands are there. Folders of quantised weights that commands name are made first,
where they are not there.
"""

import argparse
import gc
import io
import json
import os
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from suites import QUANTIZED, SUITES, File, Service

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_START_S = 300

Done = subprocess.CompletedProcess[str]
# A module or a script, and its arguments → what became of it.
Run = Callable[[str, Sequence[str]], Done]


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 where every file is complete."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_choice(parser)
    parser.add_argument(
        "--parts", type=Path, default=ROOT / "build" / "parts",
        help="folder for what commands measured; those that are there are not run again",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for result files")
    parser.add_argument(
        "--in-process", action="store_true",
        help="run all commands in this process, which saves each its imports and a GPU's start",
    )  # fmt: skip
    parser.add_argument(
        "--delete-folders", action="store_true",
        help="of quantised weights, each after the last command that needs it",
    )  # fmt: skip
    asked = parser.parse_args(given)
    run = _run_here if asked.in_process else _run_apart
    wanted = chosen_files(parser, asked)
    missing = [c for name, file in wanted.items() for c in _to_run(name, file, asked.parts)]
    folders = Folders(missing, run, deletes=asked.delete_folders)
    incomplete = [
        name
        for name, file in wanted.items()
        if not _record(name, file, asked.parts, asked.results, run, folders)
    ]
    for name in incomplete:
        print(f"{name}: not all of its commands succeeded, so it stays as it is")
    return 1 if incomplete else 0


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Arguments that choose files, for `chosen_files`."""
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--only", nargs="+", metavar="FILE", help="some of the suite's files")


def chosen_files(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> dict[str, File]:
    """The files that are asked for, by name; names that the suite lacks end the program."""
    files = SUITES[asked.suite]
    unknown = sorted({*(asked.only or ())} - {*files})
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: the suite has {', '.join(files)}")
    return {name: file for name, file in files.items() if not asked.only or name in asked.only}


def _record(
    name: str, file: File, parts: Path, results: Path, run: Run, folders: "Folders"
) -> bool:
    """Run what is missing, and write the file if nothing is any more."""
    places = [_place(name, command, parts) for command in file.commands]
    missing = _missing(name, file, parts)
    with ExitStack() as stack:
        if missing:
            for service in file.services:
                stack.enter_context(folders.of(service.arguments))
                stack.enter_context(_running(service))
        for command in missing:
            with folders.of(command):
                _measure(command, _place(name, command, parts), run)
    if not all(place.exists() for place in places):
        return False
    rows = [row for place in places for row in json.loads(place.read_text(encoding="utf-8"))]
    results.mkdir(parents=True, exist_ok=True)
    (results / name).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"{name}: {len(rows)} rows")
    return True


def _missing(name: str, file: File, parts: Path) -> list[str]:
    """Commands of a file that have not measured yet."""
    return [command for command in file.commands if not _place(name, command, parts).exists()]


def _to_run(name: str, file: File, parts: Path) -> list[str]:
    """These, and what starts the servers that they ask."""
    missing = _missing(name, file, parts)
    return missing + [service.arguments for service in file.services if missing]


def _place(name: str, command: str, parts: Path) -> Path:
    """Where the rows of one command of a file are kept."""
    return parts / name / f"{sha256(command.encode()).hexdigest()[:12]}.json"


class Folders:
    """Quantised models that commands name: each is there before the first of them.

    Args:
        commands: all that will run, and arguments of servers.
        run: runs the program that makes one.
        deletes: each after the last command that names it.
    """

    def __init__(self, commands: Iterable[str], run: Run, *, deletes: bool) -> None:
        self._uses = Counter(folder for command in commands for folder in self._named(command))
        self._run, self._deletes = run, deletes

    @contextmanager
    def of(self, command: str) -> Iterator[None]:
        """What a command needs, while it runs."""
        named = self._named(command)
        if missing := [folder for folder in named if not (ROOT / folder).exists()]:
            done = self._run("benchmarks/quantized_folders.py", missing)
            print(done.stdout + done.stderr, end="", flush=True)
        yield
        self._uses.subtract(named)
        for folder in named:
            if self._deletes and not self._uses[folder]:
                shutil.rmtree(ROOT / folder, ignore_errors=True)

    @staticmethod
    def _named(command: str) -> list[str]:
        return [word for word in shlex.split(command) if word.startswith(f"{QUANTIZED}/")]


def _measure(command: str, place: Path, run: Run) -> None:
    start = time.monotonic()
    done = run("soloist", [*shlex.split(command), "--json"])
    print(f"{time.monotonic() - start:6.1f} s  soloist {command}", flush=True)
    if done.returncode:
        print(done.stderr.rstrip(), flush=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    json.loads(done.stdout)  # all of it, or nothing is kept
    place.write_text(done.stdout, encoding="utf-8")


def _run_apart(program: str, words: Sequence[str]) -> Done:
    """A module or a script in a process of its own."""
    start = [program] if program.endswith(".py") else ["-m", program]
    return subprocess.run(
        [sys.executable, *start, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


def _run_here(program: str, words: Sequence[str]) -> Done:
    """The same in this process, which then frees what it took of a GPU."""
    out, err, given = io.StringIO(), io.StringIO(), sys.argv
    status: int | str | None = 0
    sys.argv = [program, *words]  # rows tell it
    with chdir(ROOT), redirect_stdout(out), redirect_stderr(err):
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except SystemExit as end:
            status = end.code
        except Exception:  # noqa: BLE001 - a process of its own would end likewise
            status = traceback.format_exc()
        finally:
            sys.argv = given
    if isinstance(status, str):
        err.write(f"{status}\n")
    gc.collect()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    code = status if isinstance(status, int) else int(status is not None)
    return subprocess.CompletedProcess([program, *words], code, out.getvalue(), err.getvalue())


@contextmanager
def _running(service: Service) -> Iterator[None]:
    """Start a server, wait until it lists its model, and end it."""
    missing = [package for package in service.needs if find_spec(package) is None]
    if missing:
        raise SystemExit(f"{service.name} needs more: pip install {' '.join(missing)}")
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", service.port)) == 0:
            raise SystemExit(f"port {service.port} is taken: {service.name} needs it")
    starts = f"import runpy; runpy.run_module({service.module!r}, run_name='__main__')"
    if service.module.startswith("transformers"):
        starts = f"from {service.module} import main; main()"
    program = f"import sys; sys.argv[1:] = {shlex.split(service.arguments)!r}; {starts}"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT / service.folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            _wait_for(f"http://localhost:{service.port}/health", process, service.name)
            yield
        finally:
            process.terminate()


def _wait_for(url: str, process: "subprocess.Popen[bytes]", name: str) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10):
                if process.poll() is None:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"{name} did not start: {url} gives no answer")


if __name__ == "__main__":
    sys.exit(main())
