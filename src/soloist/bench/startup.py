"""`bench startup`: from the start of `soloist run` in a fresh process to its first token.

Or from the start of `soloist serve` to the first text of a chat. With kernels that an earlier start
or `soloist compile` compiled, and with an empty cache. Weights come from files that the operating
system has read before, since a first run that is not timed reads them all.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from soloist.bench import record, rows
from soloist.bench.caches import gpu_uuid
from soloist.bench.client import Client, Refused, Target
from soloist.bench.clocks import watching
from soloist.bench.folder import random_model
from soloist.bench.others import others_counted
from soloist.bench.process_memory import TreeMemory
from soloist.bench.sizes import require_at_least
from soloist.bench.subject import shape_name
from soloist.engine.config import GpuCount, Precision, resolve_device
from soloist.engine.engine import devices
from soloist.errors import RunFailed, ServerFailed, SettingError
from soloist.settings import environment_with_cache

_PROMPT = "def fibonacci(n):\n"
_SERVED = "model"
# Between two looks at a process's memory.
_LOOK_S = 0.02
# A first token may hold part of a character only.
_CHAT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        model: a folder, a hub id or a shipped model; unused with a shape.
        shape: a config.json, for a folder of random weights instead.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        precision: of weights and KV cache.
        runs: timed, of each kind.
        kinds: of starts: with all kernels compiled before, by a start or by `soloist compile`, or
            with none.
        accepted_fields: of the model's config.json, that nobody knows.
        gpus: that run the model together, as `soloist run` takes them.
        serves: what is timed is `soloist serve` and a chat with it.
        context_tokens: positions of the KV cache; None leaves them to the program.
    """

    model: str
    shape: Path | None
    device: str
    precision: Precision
    runs: int
    gpus: GpuCount = 1
    kinds: tuple[rows.KernelCache, ...] = ("warm", "cold")
    accepted_fields: tuple[str, ...] = ()
    serves: bool = False
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """One process.

    Attributes:
        total_s: from starting it to its first token.
        weights_s: of them, reading weights, to where they stay or are packed from; on a GPU
            they are read while Python imports, and the two are not told apart. None of a server.
        kernels_s: of them, compiling kernels.
        num_kernels: compiled; 0 where all were in the cache, or none is needed.
        report: what `soloist run --json` printed; of a server nothing.
        ready_s: of total_s, until a server was ready.
        host_bytes: most memory of the host that the process had, where somebody looked; files that
            are mapped do not count.
    """

    total_s: float
    weights_s: float | None
    kernels_s: float
    num_kernels: int
    report: dict[str, Any]
    ready_s: float | None = None
    host_bytes: int | None = None


def measure(plan: Plan) -> list[rows.StartupRow]:
    """A row for each kind of start; of the reference, which compiles nothing, a warm one only.

    Raises:
        SettingError: sizes that cannot be measured.
        RunFailed: the command failed; the message is its own.
        ServerFailed: the server was ready, and did not answer.
    """
    require_at_least(("--runs", plan.runs, 1))
    device = resolve_device(plan.device, devices())
    with (
        _model(plan, torch.device(device)) as model,
        tempfile.TemporaryDirectory() as kept,
        watching(gpu_uuid(torch.device(device))) as watch,
        others_counted() as others,
    ):

        def start(cache: str) -> Start:
            timed = _start_server if plan.serves else _start
            return timed(_command(plan, model, device), Path(cache))

        if "compiled" in plan.kinds and device != "cpu":
            _fill(plan, model, Path(kept))
        run = replace(plan, serves=False)
        first = _start(_command(run, model, device), Path(kept), watches=True)
        compiles = first.report["executor"] == "decode kernel"
        if plan.serves:
            start(kept)  # what only a server imports and compiles
        starts: dict[rows.KernelCache, list[Start]] = {}
        if "compiled" in plan.kinds and compiles:
            starts["compiled"] = [start(kept) for _ in range(plan.runs)]
        if "warm" in plan.kinds or not compiles:
            starts["warm"] = [start(kept) for _ in range(plan.runs)]
        if "cold" in plan.kinds and compiles:
            starts["cold"] = []
            for _ in range(plan.runs):
                with tempfile.TemporaryDirectory() as empty:
                    starts["cold"].append(start(empty))
    return [
        replace(_row(plan, kind, of_kind, first, watch.clocks), others_cores=others.cores)
        for kind, of_kind in starts.items()
    ]


@contextmanager
def _model(plan: Plan, device: torch.device) -> Iterator[str]:
    if plan.shape is None:
        yield plan.model
        return
    with random_model(plan.shape, plan.precision, device) as folder:
        yield str(folder)


def _command(plan: Plan, model: str, device: str) -> list[str]:
    # A GPU with a number would be the only one.
    first = device if plan.gpus == 1 else plan.device
    asked = ["run", model, "--prompt", _PROMPT, "--max-tokens", "1", "--ignore-eos", "--json"]
    if plan.serves:
        asked = ["serve", model, "--port", "0", "--name", _SERVED]
    if plan.context_tokens is not None:
        asked += ["--context", str(plan.context_tokens)]
    return [
        sys.executable, "-m", "soloist", *asked,
        "--device", first, *_options(plan),
    ]  # fmt: skip


def _options(plan: Plan) -> list[str]:
    """What says how a model runs, and so which kernels it has."""
    accepted = (word for name in plan.accepted_fields for word in ("--accept-field", name))
    return ["--gpus", str(plan.gpus), "--precision", plan.precision, *accepted]


def _fill(plan: Plan, model: str, cache: Path) -> None:
    """Let `soloist compile` fill a cache for this machine's GPU."""
    done = subprocess.run(  # noqa: S603 - this program itself
        [
            sys.executable, "-m", "soloist", "compile", model, "--output", str(cache),
            *_options(plan),
        ],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(done.stderr.decode(errors="replace"))


def _start(command: list[str], cache: Path, *, watches: bool = False) -> Start:
    """One process; where it `watches` its memory it is slower, and nobody counts its time."""
    before = _builds(cache)
    start = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - this program itself
        command,
        env=environment_with_cache(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what follows the first byte stays in the pipe
    ) as process:
        assert process.stdout is not None
        most = _watched(process) if watches else lambda: None
        # The report is printed at the only token's end.
        first = process.stdout.read(1)
        total_s = time.perf_counter() - start
        rest, err = process.communicate()
    if process.returncode:
        raise RunFailed(err.decode(errors="replace"))
    report = json.loads(first + rest)
    new = _new_builds(cache, before)
    return Start(total_s, report["load_s"], covered_s(new), len(new), report, None, most())


def _watched(process: "subprocess.Popen[bytes]") -> Callable[[], int | None]:
    """Look at the memory of a process until it ends; call for the most that was seen.

    None where a system does not tell it, or the process has ended: the command's failure is told.
    """
    try:
        memory = TreeMemory(process.pid)
    except SettingError:
        return lambda: None
    most = 0

    def look() -> None:
        nonlocal most
        while process.poll() is None:
            most = max(most, memory.read())
            time.sleep(_LOOK_S)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()

    def found() -> int:
        looking.join()
        return most

    return found


def _start_server(command: list[str], cache: Path) -> Start:
    before = _builds(cache)
    start = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - this program itself
        command,
        env=environment_with_cache(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            with Client(Target(_address(process))) as client:
                _wait_until_ready(process)
                ready_s = time.perf_counter() - start
                total_s = ready_s + _first_text_s(client)
        finally:
            process.terminate()
            process.communicate()
    new = _new_builds(cache, before)
    return Start(total_s, None, covered_s(new), len(new), {}, ready_s)


def _address(process: "subprocess.Popen[str]") -> str:
    """The server's, which it says first.

    Raises:
        RunFailed: it ended instead.
    """
    assert process.stderr is not None
    first = process.stderr.readline()
    if found := re.search(r"http://\S+/v1", first):
        return found[0]
    raise RunFailed(first + process.stderr.read(), "soloist serve")


def _wait_until_ready(process: "subprocess.Popen[str]") -> None:
    """Read what a server says until it takes requests.

    Raises:
        RunFailed: it ended instead.
    """
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        if line == "ready\n":
            return
        told += line
    raise RunFailed(told, "soloist serve")


def _first_text_s(client: Client) -> float:
    """Seconds from sending a chat to the first text of its answer.

    Raises:
        ServerFailed: there is none.
    """
    try:
        answer = client.ask(_PROMPT, _CHAT_TOKENS, _SERVED, {})
    except Refused as refused:
        raise ServerFailed(client.url, refused.told) from refused
    if not answer.text:
        raise ServerFailed(client.url, "its answer has no text")
    return next(chunk.at_s for chunk in answer.chunks if chunk.text)


def _new_builds(cache: Path, before: Iterable[str]) -> list[tuple[float, float]]:
    return [span for place, span in _builds(cache).items() if place not in before]


def _builds(cache: Path) -> dict[str, tuple[float, float]]:
    """From when to when each kernel in the cache was compiled, by the file that tells of it."""
    spans = {}
    for file in cache.glob("kernels/*/build.json"):
        end = file.stat().st_mtime
        seconds = json.loads(file.read_text(encoding="utf-8"))["seconds"]
        spans[file.parent.name] = (end - seconds, end)
    return spans


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one (start, end): some kernels are compiled at the same time."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _row(
    plan: Plan,
    kind: rows.KernelCache,
    starts: list[Start],
    first: Start,
    clocks: rows.Clocks | None,
) -> rows.StartupRow:
    report = first.report
    memory = report["gpu_memory"] or {}
    weights_s = [s.weights_s for s in starts if s.weights_s is not None]
    others = [s.total_s - s.weights_s - s.kernels_s for s in starts if s.weights_s is not None]
    ready_s = [s.ready_s for s in starts if s.ready_s is not None]
    return rows.StartupRow(
        bench="startup",
        shape=Path(plan.model).name if plan.shape is None else shape_name(plan.shape),
        device=report["device"],
        executor=report["executor"],
        precision=report["precision"],
        kernel_cache=kind,
        runs=len(starts),
        total_s=rows.Spread.of([s.total_s for s in starts]),
        weights_s=rows.Spread.of(weights_s) if weights_s else None,
        kernels_s=rows.Spread.of([s.kernels_s for s in starts]),
        rest_s=rows.Spread.of(others) if others else None,
        kernels_built=starts[0].num_kernels,
        clocks=clocks,
        weights=report["weights"],
        checkpoint_bytes=report["checkpoint_bytes"],
        gpu_memory_bytes=memory.get("taken_bytes"),
        gpu_tensors_bytes=memory.get("tensors_bytes"),
        kv_cache_bytes=memory.get("kv_bytes"),
        host_memory_bytes=first.host_bytes,
        context_tokens=report["context_tokens"],
        program="soloist serve" if plan.serves else "soloist run",
        ready_s=rows.Spread.of(ready_s) if ready_s else None,
        **record.origin("torch"),
    )
