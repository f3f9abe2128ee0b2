"""What the kernel tells of itself: time stamps of one round, and a block that gets nowhere."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from soloist.bench.timeline import read
from soloist.model.folder import shipped_folder

pytestmark = pytest.mark.gpu

SHAPE = shipped_folder("etude") / "config.json"
# Blocks' clocks agree about as well as one reads them.
CLOCK_NS = 200


@pytest.mark.timed
@pytest.mark.parametrize(
    "subject",
    [
        ("etude",),
        ("etude", "-p", "x = 1"),
        ("--shape", SHAPE),
        ("--shape", SHAPE, "--context", 4000),
        ("--shape", SHAPE, "--weights", "int4", "--head-weights", "int8"),
        ("etude", "--weights", "fp8"),
    ],
    ids=["model", "prompt", "shape", "context", "codes", "rounded"],
)
def test_a_trace(soloist, tmp_path: Path, subject) -> None:
    file, drawing = tmp_path / "trace.json", tmp_path / "trace.svg"
    done = soloist("trace", *subject, "--round", 8, "-o", file, "--picture", drawing, "--json")
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert facts["position"] >= 8
    assert 0 < facts["mbu"] < 1.2
    assert sum(
        phase[f"{activity}_us"]
        for phase in facts["phases"]
        for activity in ("waiting", "multiplying", "finishing")
    ) == pytest.approx(facts["round_us"])
    assert 0.5 < facts["round_us"] / facts["untraced_us"] < 2
    assert list(facts["shares"]) == [
        "streaming", "exchanges", "multiplication", "attention", "sampling", "host",
    ]  # fmt: skip
    assert all(us >= 0 for us in facts["shares"].values())
    total = facts["round_us"] + facts["host_us"]
    assert sum(facts["shares"].values()) == pytest.approx(total, rel=1e-3)
    # Of the kernel alone: the host takes as long as it is busy.
    assert facts["shares"]["exchanges"] > 0.25 * facts["round_us"], "étude waits more than most"
    read = {part["phase"]: part["num_bytes"] for part in facts["traffic"]}
    assert read.keys() == {"qkv", "attention", "output", "gate_up", "down", "head"}
    assert sum(read.values()) == pytest.approx(facts["streamed_bytes"], rel=0.01)
    wanted = {"int4": "int4+int8 head", "fp8": "fp8"}
    assert facts["weights"] == next((wanted[w] for w in subject if w in wanted), "bf16")
    again = soloist("trace", "--from", file)
    assert again.status == 0, again.err
    for words in ("MBU", "gate_up", "waits for other blocks", "The wall is"):
        assert words in again.out
    assert drawing.read_text().startswith("<svg")


def test_nothing_is_used_before_it_is_made(soloist, tmp_path: Path) -> None:
    """Blocks sum what all blocks published: a wrong clock of one of them would show."""
    file = tmp_path / "trace.json"
    assert soloist("trace", "etude", "-o", file).status == 0
    ends = defaultdict(list)
    for s in read(file).slices:
        ends[s.span.layer, s.span.phase, s.span.name].append(s.end_ns)
    pairs = [("output", "gate_up"), ("gate_up", "down"), ("down", "qkv")]
    for made, used in pairs:
        for layer in range(7):
            after = layer + (made == "down")
            last_made = max(ends[layer, made, "multiply"])
            assert min(ends[after, used, "finish"]) > last_made - CLOCK_NS, f"{made} of {layer}"


@pytest.mark.timed
def test_builds_that_leave_something_out(soloist) -> None:
    done = soloist("trace", "--shape", SHAPE, "--ablations", "--json")
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    times = {build["leaves_out"]: build["round_us"] for build in facts["builds"]}
    assert times.keys() == {"none", "waits", "stream", "multiply"}
    assert times["waits"] < times["none"], "étude is all waiting"
    assert times["multiply"] < 1.05 * times["stream"]
    assert 0 < facts["floor_us"] < times["none"]


STUCK = """
import os
from soloist.engine import Engine, EngineConfig
from soloist.errors import KernelStuck
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query

decoder = Engine.load(EngineConfig("etude", device="cuda", context_tokens=256)).model.decoder
decoder.load(Build(silent_block=3, stuck_ns=100_000_000))
try:
    decoder.run([Query(0, 0, [1])], 4)
except KernelStuck as error:
    print(error.message, flush=True)
os._exit(0)  # the context is lost, and tidying up would say so
"""


def test_a_stuck_block_says_where_it_is_and_what_it_waits_for() -> None:
    """In a process of its own: the trap ends the GPU's context."""
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    for fact in (
        "stuck: block ", " on SM ", "round 0", "layer 0", "phase qkv",
        "waits for the residual stream of all blocks", "have landed",
        "so other blocks are behind",
    ):  # fmt: skip
        assert fact in done.stdout, done.stdout + done.stderr
