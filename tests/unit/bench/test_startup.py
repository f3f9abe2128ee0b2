"""Which processes would be started with which cache, and what becomes of their times."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soloist.bench import startup
from soloist.errors import RunFailed, ServerFailed

REPORT = {
    "device": "a GPU", "precision": "bf16", "weights": "int4", "load_s": 2.0,
    "checkpoint_bytes": 100, "gpu_memory": None, "context_tokens": 64,
}  # fmt: skip
MEMORY = {"taken_bytes": 170, "tensors_bytes": 160, "kv_bytes": 50}


@pytest.mark.parametrize("executor", ["decode kernel", "reference"])
def test_warm_runs_follow_one_that_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    caches: list[Path] = []

    def start(_command: list[str], cache: Path, **_: bool) -> startup.Start:
        is_new = cache not in caches
        caches.append(cache)
        kernels_s = 10.0 if is_new else 0.0
        memory = MEMORY if executor == "decode kernel" else None
        report = {**REPORT, "executor": executor, "gpu_memory": memory}
        return startup.Start(3.5 + kernels_s, 2.0, kernels_s, 2 * is_new, report)

    monkeypatch.setattr(startup, "_start", start)
    rows = startup.measure(startup.Plan("a/model", None, "cpu", "auto", 2))
    assert rows[0].shape == "model"
    assert (rows[0].kernel_cache, rows[0].kernels_built, rows[0].runs) == ("warm", 0, 2)
    assert rows[0].total_s.median == 3.5
    assert caches[0] == caches[1] == caches[2]
    for row in rows:
        assert row.weights_s.median == 2.0
        assert row.rest_s.median == 1.5
        assert row.checkpoint_bytes == 100
    memory = [rows[0].gpu_memory_bytes, rows[0].gpu_tensors_bytes, rows[0].kv_cache_bytes]
    if executor == "reference":
        assert len(rows) == 1
        assert memory == [None, None, None]
        return
    assert memory == [170, 160, 50]
    assert (rows[1].kernel_cache, rows[1].kernels_built) == ("cold", 2)
    assert rows[1].kernels_s.max == 10.0
    assert len({*caches}) == 3


def test_a_cache_that_was_filled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same model, as it will run, before anything starts; no start compiles."""
    done: list[list[str]] = []
    run_other = subprocess.run

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[Any]:
        if "compile" not in command:
            return run_other(command, **how)
        done.append(command)
        (Path(command[command.index("--output") + 1]) / "kernels").mkdir()
        return subprocess.CompletedProcess(command, 0, b"", b"")

    def start(_command: list[str], cache: Path, **_: bool) -> startup.Start:
        assert (cache / "kernels").is_dir()
        return startup.Start(3.5, 2.0, 0.0, 0, {**REPORT, "executor": "decode kernel"})

    monkeypatch.setattr(startup, "resolve_device", lambda *_: "cuda:0")
    monkeypatch.setattr(startup, "gpu_uuid", lambda _: None)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(startup, "_start", start)
    fields = ("unknown",)
    plan = startup.Plan("a/model", None, "auto", "bf16", 2, 2, ("compiled",), fields)
    (row,) = startup.measure(plan)
    assert (row.kernel_cache, row.kernels_built, row.runs) == ("compiled", 0, 2)
    (command,) = done
    assert command[3:5] == ["compile", "a/model"]
    assert "--gpus 2 --precision bf16 --accept-field unknown" in " ".join(command)


def test_a_cache_that_cannot_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 3, b"", b"error: no room\n")
    monkeypatch.setattr(startup, "resolve_device", lambda *_: "cuda:0")
    monkeypatch.setattr(startup, "gpu_uuid", lambda _: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    plan = startup.Plan("a/model", None, "auto", "bf16", 2, kinds=("compiled",))
    with pytest.raises(RunFailed, match="no room"):
        startup.measure(plan)


@pytest.mark.parametrize(
    ("gpus", "asked"), [(1, "--device cuda:0 --gpus 1"), (2, "--device auto --gpus 2")]
)
def test_a_gpu_with_a_number_is_the_only_one(gpus: int, asked: str) -> None:
    plan = startup.Plan("a/model", None, "auto", "auto", 2, gpus)
    assert asked in " ".join(startup._command(plan, "a/model", "cuda:0"))


def printing(told: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.stderr.write({told!r})"]


@pytest.mark.parametrize(
    "told", ["error: no such model\n", "a at http://127.0.0.1:1/v1 · loading …\nerror: no memory\n"]
)
def test_a_server_that_ends_says_why(told: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"soloist serve.* failed: no (such model|memory)"):
        startup._start_server(printing(told), tmp_path)


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    ready = printing("a at http://127.0.0.1:1/v1 · loading …\nloaded\nready\n")
    with pytest.raises(ServerFailed, match=r"http://127\.0\.0\.1:1/v1"):
        startup._start_server(ready, tmp_path)


def test_times_of_compiling_come_from_the_cache(tmp_path: Path) -> None:
    assert startup._builds(tmp_path) == {}
    for name, seconds, end in (("a", 2.5, 100), ("b", 1, 200)):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        file = tmp_path / "kernels" / name / "build.json"
        file.write_text(f'{{"seconds": {seconds}}}')
        os.utime(file, (end, end))
    assert startup._builds(tmp_path) == {"a": (97.5, 100), "b": (199, 200)}


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 4.0)], 3.0),
        ([(5.0, 6.0), (1.0, 4.0)], 4.0),
        ([(1.0, 4.0), (2.0, 6.0)], 5.0),
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 5.0)], 8.0),
    ],
    ids=["none", "one", "apart", "overlapping", "within"],
)
def test_kernels_that_are_compiled_at_once_count_once(
    spans: list[tuple[float, float]], seconds: float
) -> None:
    assert startup.covered_s(spans) == seconds


@pytest.mark.parametrize(
    ("told", "message", "hint"),
    [
        ("loaded\nerror: no such thing\n\nhint: try another\n", "no such thing", "try another"),
        ("", "it printed no error", "soloist run"),
    ],
)
def test_a_process_that_fails(told: str, message: str, hint: str) -> None:
    error = RunFailed(told)
    assert error.message.endswith(message)
    assert hint in error.hint


def test_the_start_that_is_not_timed_is_watched(tmp_path: Path) -> None:
    """Its memory, also once it has ended."""
    program = "import time; x = bytearray(200 << 20); time.sleep(0.5); print('{\"load_s\": 1.0}')"
    command = [sys.executable, "-c", program]
    found = startup._start(command, tmp_path, watches=True)
    assert found.host_bytes is not None
    assert found.host_bytes > 200 << 20
    assert startup._start(command, tmp_path).host_bytes is None


def test_a_context_is_that_of_the_program() -> None:
    plan = startup.Plan("a/model", None, "cpu", "auto", 2, context_tokens=8192)
    for serves in (False, True):
        command = startup._command(replace(plan, serves=serves), "a/model", "cpu")
        assert command[command.index("--context") + 1] == "8192"
