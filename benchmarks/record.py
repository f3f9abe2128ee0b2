"""Record result files: `python benchmarks/record.py cpu` or `h200`, from the repository's root.

Runs every command of `suites.py` in turn and writes `results/`. What a command measured is kept in
a folder of parts, so that a run that was interrupted goes on where it stopped; a file is replaced
once all of its commands are there.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from suites import SUITES, File, Service

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_START_S = 300


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 where every file is complete."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--only", nargs="+", metavar="FILE", help="some of the suite's files")
    parser.add_argument(
        "--parts", type=Path, default=ROOT / "build" / "parts",
        help="folder for what commands measured; those that are there are not run again",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for result files")
    asked = parser.parse_args(given)
    files = SUITES[asked.suite]
    unknown = sorted({*(asked.only or ())} - {*files})
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: the suite has {', '.join(files)}")
    incomplete = [
        name
        for name, file in files.items()
        if (not asked.only or name in asked.only)
        and not _record(name, file, asked.parts, asked.results)
    ]
    for name in incomplete:
        print(f"{name}: not all of its commands succeeded, so it stays as it is")
    return 1 if incomplete else 0


def _record(name: str, file: File, parts: Path, results: Path) -> bool:
    """Run what is missing, and write the file if nothing is any more."""
    places = [parts / name / f"{_key(command)}.json" for command in file.commands]
    missing = [c for c, place in zip(file.commands, places, strict=True) if not place.exists()]
    with ExitStack() as stack:
        if missing:
            for service in file.services:
                stack.enter_context(_running(service))
        for command in missing:
            _measure(command, parts / name / f"{_key(command)}.json")
    if not all(place.exists() for place in places):
        return False
    rows = [row for place in places for row in json.loads(place.read_text(encoding="utf-8"))]
    results.mkdir(parents=True, exist_ok=True)
    (results / name).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"{name}: {len(rows)} rows")
    return True


def _key(command: str) -> str:
    return sha256(command.encode()).hexdigest()[:12]


def _measure(command: str, place: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "soloist", *shlex.split(command), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(f"{time.monotonic() - start:6.1f} s  soloist {command}", flush=True)
    if done.returncode:
        print(done.stderr.rstrip(), flush=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    json.loads(done.stdout)  # all of it, or nothing is kept
    place.write_text(done.stdout, encoding="utf-8")


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
