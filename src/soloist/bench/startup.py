"""`bench startup`: from the start of `soloist run` in a fresh process to its first token.

With kernels compiled before, and with an empty cache. Weights come from files that the operating
system has read before, since a first run that is not timed reads them all.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from soloist.bench import record, rows
from soloist.bench.caches import gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.folder import random_model
from soloist.bench.others import others_counted
from soloist.bench.sizes import require_at_least
from soloist.bench.subject import shape_name
from soloist.engine.config import GpuCount, Precision, resolve_device
from soloist.engine.engine import devices
from soloist.errors import RunFailed
from soloist.settings import environment_with_cache

_PROMPT = "def fibonacci(n):\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        model: a folder, a hub id or a shipped model; unused with a shape.
        shape: a config.json, for a folder of random weights instead.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        precision: of weights and KV cache.
        runs: timed, of each kind.
        kinds: of starts: with all kernels compiled before, or with none.
        accepted_fields: of the model's config.json, that nobody knows.
        gpus: that run the model together, as `soloist run` takes them.
    """

    model: str
    shape: Path | None
    device: str
    precision: Precision
    runs: int
    gpus: GpuCount = 1
    kinds: tuple[rows.KernelCache, ...] = ("warm", "cold")
    accepted_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """One process.

    Attributes:
        total_s: from starting it to its first token.
        weights_s: of them, reading weights, to where they stay or are packed from; on a GPU
            they are read while Python imports, and the two are not told apart.
        kernels_s: of them, compiling kernels.
        num_kernels: compiled; 0 where all were in the cache, or none is needed.
        report: what `soloist run --json` printed.
    """

    total_s: float
    weights_s: float
    kernels_s: float
    num_kernels: int
    report: dict[str, Any]


def measure(plan: Plan) -> list[rows.StartupRow]:
    """A row with kernels in the cache; with the decode kernel, also one with an empty cache.

    Raises:
        SettingError: sizes that cannot be measured.
        RunFailed: the command failed; the message is its own.
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
            return _start(_command(plan, model, device), Path(cache))

        compiles = start(kept).report["executor"] == "decode kernel"
        starts: dict[rows.KernelCache, list[Start]] = {}
        if "warm" in plan.kinds or not compiles:
            starts["warm"] = [start(kept) for _ in range(plan.runs)]
        if "cold" in plan.kinds and compiles:
            starts["cold"] = []
            for _ in range(plan.runs):
                with tempfile.TemporaryDirectory() as empty:
                    starts["cold"].append(start(empty))
    return [
        replace(_row(plan, kind, of_kind, watch.clocks), others_cores=others.cores)
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
    return [
        sys.executable, "-m", "soloist", "run", model, "--prompt", _PROMPT, "--max-tokens", "1",
        "--ignore-eos", "--device", first, "--gpus", str(plan.gpus), "--precision", plan.precision,
        "--json", *(word for name in plan.accepted_fields for word in ("--accept-field", name)),
    ]  # fmt: skip


def _start(command: list[str], cache: Path) -> Start:
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
        # The report is printed at the only token's end.
        first = process.stdout.read(1)
        total_s = time.perf_counter() - start
        rest, err = process.communicate()
    if process.returncode:
        raise RunFailed(err.decode(errors="replace"))
    report = json.loads(first + rest)
    built = _builds(cache)
    new = [span for place, span in built.items() if place not in before]
    return Start(total_s, report["load_s"], covered_s(new), len(new), report)


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
    clocks: rows.Clocks | None,
) -> rows.StartupRow:
    report = starts[0].report
    memory = report["gpu_memory"] or {}
    others = [s.total_s - s.weights_s - s.kernels_s for s in starts]
    return rows.StartupRow(
        bench="startup",
        shape=Path(plan.model).name if plan.shape is None else shape_name(plan.shape),
        device=report["device"],
        executor=report["executor"],
        precision=report["precision"],
        kernel_cache=kind,
        runs=len(starts),
        total_s=rows.Spread.of([s.total_s for s in starts]),
        weights_s=rows.Spread.of([s.weights_s for s in starts]),
        kernels_s=rows.Spread.of([s.kernels_s for s in starts]),
        rest_s=rows.Spread.of(others),
        kernels_built=starts[0].num_kernels,
        clocks=clocks,
        weights=report["weights"],
        checkpoint_bytes=report["checkpoint_bytes"],
        gpu_memory_bytes=memory.get("taken_bytes"),
        gpu_tensors_bytes=memory.get("tensors_bytes"),
        kv_cache_bytes=memory.get("kv_bytes"),
        **record.origin("torch"),
    )
