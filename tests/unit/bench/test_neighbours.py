"""Neighbours of a toy server: what they do to its stream is seen, whatever it is."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from soloist.bench import neighbours
from soloist.bench.bodies import KINDS
from soloist.bench.client import Target
from soloist.bench.process_memory import TreeMemory, listener
from soloist.bench.rows import NeighboursRow
from soloist.bench.sender import NEIGHBOURS
from soloist.errors import SettingError
from unit.bench.toy_server import Toy, serving

PLAN = neighbours.Plan(
    Target("http://127.0.0.1:9"), ("choices",), None, max_tokens=40, runs=2, patience_s=30
)
FREEZE_S = 1.0


class Frozen(Toy):
    """Whoever sends a large body stops all streams for a while; then texts may differ."""

    word = "word "

    def refusal(self, asked: dict) -> str | None:
        if "guided_choice" in asked:
            freezing = threading.Thread(target=self.freeze)
            freezing.start()
            freezing.join()
            return "unknown field: guided_choice"
        return super().refusal(asked)

    def freeze(self) -> None:
        with self.lock:
            threading.Event().wait(FREEZE_S)

    def chunks(self, asked: dict, is_chat: bool) -> Iterator[tuple[float, dict]]:
        for at_s, body in super().chunks(asked, is_chat):
            with self.lock:
                yield at_s, json.loads(json.dumps(body).replace("word ", self.word))


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    monkeypatch.setattr(neighbours, "_SETTLE_S", 0.0)


def toy(**options: object) -> Frozen:
    made = Frozen(4, tokens_per_s=200, first_s=0.01, **options)
    made.lock = threading.Lock()
    return made


def measured(server: Toy, key: str | None = None, **changed: object) -> list[NeighboursRow]:
    with serving(server):
        target = Target(server.url, key=key, name="toy")
        return neighbours.measure(replace(PLAN, target=target, **changed))


def test_a_neighbour_that_freezes_a_stream_is_seen() -> None:
    server = toy()
    alone, beside = measured(server, key="sk-1")
    assert (alone.neighbour, beside.neighbour) == ("none", "choices")
    assert alone.gap_ms.max < FREEZE_S * 1e3 * 0.9 <= beside.gap_ms.max
    assert (alone.runs, alone.streams, beside.runs) == (2, 2, 2)
    if (speed := beside.decode_tokens_per_s) is not None:  # a frozen stream may come all at once
        assert speed.min < alone.decode_tokens_per_s.median
        share = speed.median / alone.decode_tokens_per_s.median
        assert beside.share_of_alone == pytest.approx(share, abs=1e-3)
    assert alone.share_of_alone is None
    assert alone.same_text
    assert beside.same_text
    assert beside.neighbour_statuses == ("400", "400")
    assert beside.neighbour_s.min >= FREEZE_S
    assert beside.neighbour_bytes == len(KINDS["choices"].body("toy"))
    assert (alone.neighbour_statuses, alone.neighbour_s) == ((), None)
    assert beside.health_statuses == ("200",)
    assert beside.health_ms.p50 < FREEZE_S * 1e3
    assert beside.process is beside.memory_peak_bytes is beside.memory_per_body_byte is None
    assert {asked["key"] for asked in server.asked} == {"Bearer sk-1"}


def test_streams_are_read_until_the_neighbour_has_its_answer() -> None:
    beside = measured(toy(), max_tokens=40, kinds=("probes",), runs=1)[1]
    assert beside.neighbour_s.min > 0.2, "a thousand probes outlast a stream of 0.2 s"
    assert beside.streams > 1


def test_a_text_that_changes_is_seen() -> None:
    class Changing(Frozen):
        def refusal(self, asked: dict) -> str | None:
            if "guided_choice" in asked:
                self.word = "ward "
            return Toy.refusal(self, asked)

    server = Changing(4, tokens_per_s=200, first_s=0.01)
    server.lock = threading.Lock()
    alone, beside = measured(server, runs=1)
    assert (alone.same_text, beside.same_text) == (True, False)


def test_a_server_that_dies_is_seen_and_the_rest_is_named() -> None:
    class Dying(Frozen):
        def refusal(self, asked: dict) -> str | None:
            if "guided_choice" in asked:
                self.fails = "out of memory"
            return Toy.refusal(self, asked)

    server, kinds = Dying(4, tokens_per_s=200, first_s=0.01), ("choices", "nesting", "probes")
    server.lock = threading.Lock()
    made = measured(server, kinds=kinds)
    assert [row.neighbour for row in made] == ["none", "choices"]
    assert "out of memory" in made[1].stream_errors[-1]
    assert neighbours.unmeasured(replace(PLAN, kinds=kinds), made) == ("nesting", "probes")


def test_neighbours_without_an_answer_hang_up() -> None:
    (_, nested) = measured(toy(), kinds=("nesting",), runs=1)
    assert nested.neighbour_statuses == ("RemoteProtocolError",), "no JSON reader goes so deep"
    (_, late) = measured(toy(), runs=1, patience_s=0.5)
    assert late.neighbour_statuses == ("no answer",)
    assert late.neighbour_s.max < FREEZE_S


def test_long_prompts_and_probes() -> None:
    server = toy()
    _, long, probes = measured(server, kinds=("long-prompt", "probes"))
    prompts = [asked["prompt"] for asked in server.asked if "prompt" in asked]
    assert [len(prompt) for prompt in prompts] == [3000, 3000]
    assert prompts[0][0] != prompts[1][0], "no cache has it"
    assert long.neighbour_statuses == probes.neighbour_statuses == ("200", "200")
    assert (long.memory_per_body_byte, probes.neighbour_bytes) == (None, 0)


@pytest.mark.parametrize("name", KINDS)
def test_bodies_are_as_large_as_told_and_valid(name: str) -> None:
    kind = KINDS[name]
    assert 10**6 <= len(kind.body("m")) < 32 * 2**20, "a server's usual limit lets it in"
    body = json.loads(kind.body("m", 5))
    assert (body["model"], body["max_tokens"], "prompt" in body) == ("m", 1, True)
    values = {"stops": "stop", "bias": "logit_bias", "choices": "guided_choice"}
    measured = body if name == "fields" else body[values.get(name, "prompt")]
    if name == "nesting":
        assert measured == [[[[[]]]]]
    else:
        assert len(measured) == (5 if name != "fields" else 5 + 4)
    assert json.loads(kind.body("m", 0))["prompt"] is not None if name != "nesting" else True


def test_shared_pages_count_once() -> None:
    """A process of 60 MB that forks a child has 60 MB still; the child writes, and has them too."""
    program = """
import os, sys
ballast = bytearray(60_000_000)
for i in range(0, len(ballast), 4096): ballast[i] = 1
print("ready", flush=True); sys.stdin.readline()
read, write = os.pipe()
if not os.fork():
    os.write(write, b"x"); sys.stdin.readline()
    for i in range(0, len(ballast), 4096): ballast[i] = 2
    print("written", flush=True); sys.stdin.readline(); os._exit(0)
os.read(read, 1); print("forked", flush=True); os.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            memory = TreeMemory(process.pid)
            alone = memory.read_exactly()
            assert 60e6 < alone < 80e6
            for word, wanted in (("forked", alone), ("written", alone + 60e6)):
                process.stdin.write("go\n")
                process.stdin.flush()
                assert process.stdout.readline() == f"{word}\n"
                found = [memory.read() for _ in range(25)][-1]
                assert found == pytest.approx(wanted, abs=8e6), word
                assert memory.read_exactly() == pytest.approx(found, abs=3e6)
        finally:
            for one in psutil.Process(process.pid).children():
                one.kill()
            process.kill()
    assert memory.read() == memory.read_exactly() == 0


def test_the_process_that_listens_is_found() -> None:
    with serving(Toy()) as server:
        assert listener(server.url) == psutil.Process().pid
    with pytest.raises(SettingError, match="port 9"):
        listener("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kinds": ("loud",)}, "long-prompt"),
        ({"max_tokens": 1}, "--max-tokens"),
        ({"runs": 0}, "--runs"),
        ({"patience_s": 0}, "--patience"),
        ({"pid": 2**22 + 1}, "--pid"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed: dict, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        neighbours.measure(replace(PLAN, **changed))
    assert set(KINDS) < set(NEIGHBOURS)
