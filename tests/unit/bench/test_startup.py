"""Which processes would be started with which cache, and what becomes of their times."""

import os
from pathlib import Path

import pytest

from soloist.bench import startup
from soloist.errors import RunFailed

REPORT = {
    "device": "a GPU", "precision": "bf16", "weights": "int4", "load_s": 2.0,
    "checkpoint_bytes": 100, "gpu_memory": None,
}  # fmt: skip
MEMORY = {"taken_bytes": 170, "tensors_bytes": 160, "kv_bytes": 50}


@pytest.mark.parametrize("executor", ["decode kernel", "reference"])
def test_warm_runs_follow_one_that_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    caches: list[Path] = []

    def start(_command: list[str], cache: Path) -> startup.Start:
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


@pytest.mark.parametrize(
    ("gpus", "asked"), [(1, "--device cuda:0 --gpus 1"), (2, "--device auto --gpus 2")]
)
def test_a_gpu_with_a_number_is_the_only_one(gpus: int, asked: str) -> None:
    plan = startup.Plan("a/model", None, "auto", "auto", 2, gpus)
    assert asked in " ".join(startup._command(plan, "a/model", "cuda:0"))


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
