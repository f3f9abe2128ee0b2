"""Agents' loops on an engine that saves prompts: cancels, restarts, a full disk, damaged files.

Every answer has the tokens that the same step gets where nothing is cached. On a GPU for minutes,
with `-m slow`.
"""

import errno
import gc
import random
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from soloist.engine import Chunk, Completion, Engine, EngineConfig, Request
from soloist.engine import engine as module
from soloist.engine.config import resolve
from soloist.engine.loop import EngineLoop
from soloist.kv import folder, saving
from soloist.sampling import SamplingParams

NUM_AGENTS, NUM_STEPS, ANSWER_TOKENS = 5, 5, 24
CONTEXT_TOKENS, KV_TOKENS = 4096, 6144
MOST_SAVED_BYTES = 60 * 10**6
FIRST, TOOL = "def f(x):\n    return x + 1\n\n", "# the tool returned\nimport os\nprint(os)\n"


@dataclass(frozen=True)
class Step:
    """What an agent sends, and the answer."""

    ids: list[int]
    params: SamplingParams
    wanted: tuple[int, ...]


class Disk:
    """Writes of chunks fail while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self._write = False, folder._write_all
        monkeypatch.setattr(folder, "_write_all", self.write)
        monkeypatch.setattr(saving, "_PAUSE_S", 0.2)

    def write(self, descriptor: int, data: memoryview) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(descriptor, data)


def load(device: str, root: Path | None, sequences: int = 4) -> Engine:
    return Engine.load(
        EngineConfig(
            "etude", device=device, context_tokens=CONTEXT_TOKENS, sequences=sequences,
            keeps_prefixes=True, cache_dir=root,
            cache_dir_bytes=None if root is None else MOST_SAVED_BYTES,
        )
    )  # fmt: skip


def conversations(device: str) -> list[list[Step]]:
    """What every agent will send, with answers of an engine that has cached nothing."""
    engine, made = load(device, None, sequences=1), list[list[Step]]()
    for agent in range(NUM_AGENTS):
        ids, steps = engine.tokenizer.encode(f"# {agent}\n" + FIRST * (20 + 25 * agent)), []
        for step in range(NUM_STEPS):
            params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
            if (agent + step) % 2:
                params = replace(params, temperature=0.9, seed=step)
            engine.model.forget()
            *_, end = engine.generate(ids, params)
            assert isinstance(end, Completion)
            steps.append(Step(ids, params, end.token_ids))
            ids = [*ids, *end.token_ids, *engine.tokenizer.encode(TOOL * (3 + agent))]
        made.append(steps)
    return made


class Agent:
    """One loop; a step that was cancelled is sent again."""

    def __init__(self, steps: list[Step], loop: EngineLoop, rng: random.Random) -> None:
        self._steps, self._loop, self._rng = steps, loop, rng
        self._place = self._seen = 0
        self._ticket: Request | None = None
        self._cancel_at: int | None = None
        self.num_cached = self.num_cancelled = 0

    @property
    def is_done(self) -> bool:
        return self._place == len(self._steps)

    def go_on(self) -> None:
        step = self._steps[self._place]
        if self._ticket is None:
            self._ticket, self._seen = self._loop.submit(step.ids, step.params), 0
            self._cancel_at = self._rng.choice((None, None, None, self._rng.randint(0, 20)))
        for event in self._ticket.take():
            if isinstance(event, Chunk):
                self._seen += len(event.token_ids)
                continue
            assert isinstance(event, Completion), event
            assert event.token_ids == step.wanted[: len(event.token_ids)]
            self.num_cached += event.timings.cached_tokens
            self._ticket = None
            if event.finish_reason == "cancelled":
                self.num_cancelled += 1
            else:
                assert len(event.token_ids) == ANSWER_TOKENS
                self._place += 1
            return
        if self._cancel_at is not None and self._seen >= self._cancel_at:
            self._ticket.cancel()


def live(
    engine: Engine, plans: list[list[Step]], seconds: float, rng: random.Random, disk: Disk
) -> int:
    """Agents until the time is over, some of them side by side; how many steps were cancelled."""
    loop = EngineLoop(engine.model, engine.tokenizer, engine.config.vocab_size)
    until, agents, num_cancelled = time.monotonic() + seconds, list[Agent](), 0
    try:
        while agents or time.monotonic() < until:
            disk.is_full = time.monotonic() % 2 < 0.5
            if len(agents) < rng.randint(1, 6) and time.monotonic() < until:
                agents.append(Agent(rng.choice(plans), loop, rng))
            for agent in agents:
                agent.go_on()
            num_cancelled += sum(agent.num_cancelled for agent in agents if agent.is_done)
            agents = [agent for agent in agents if not agent.is_done]
            assert time.monotonic() < until + 60, "it hangs"
            time.sleep(0.0005)
    finally:
        disk.is_full = False
        assert loop.close(within_s=60)
    engine.model.check()
    return num_cancelled


def damage(files: list[Path], rng: random.Random) -> None:
    """Change a byte of each."""
    for file in files:
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1
        file.write_bytes(content)


def saved_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.kv"))


def held_bytes() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    ("device", "num_lives", "seconds"),
    [
        ("cpu", 2, 2.5),
        pytest.param("cuda", 8, 15.0, marks=(pytest.mark.gpu, pytest.mark.slow)),
    ],
)
def test_agents_with_cancels_restarts_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, num_lives: int, seconds: float
) -> None:
    rng, disk = random.Random(0), Disk(monkeypatch)
    plans = conversations(device)
    monkeypatch.setattr(
        module, "resolve", lambda *given: replace(resolve(*given), kv_tokens=KV_TOKENS)
    )
    counts, num_cancelled, before = list[saving.SavedTokens](), 0, held_bytes()
    for number in range(num_lives):
        engine = load(device, tmp_path)
        num_cancelled += live(engine, plans, seconds, rng, disk)
        engine.model.flush(60)
        saved = engine.model.saved
        assert saved is not None
        assert saved.num_bytes <= MOST_SAVED_BYTES
        counts.append(saved)
        gone = weakref.ref(engine.model)
        del engine
        held = held_bytes()
        assert gone() is None, "something holds it"
        assert not number or held == before, "its memory stays"
        before = held
        damage(rng.sample(saved_files(tmp_path), 3), rng)
    assert counts[0].saved
    assert all(of_one.loaded for of_one in counts[1:]), "later lives find what others saved"
    assert sum(of_one.dropped for of_one in counts), "the disk was full"
    assert num_cancelled
    damage(saved_files(tmp_path), rng)
    engine = load(device, tmp_path)
    for step in (steps[-1] for steps in plans):
        *_, end = engine.generate(step.ids, step.params)
        assert isinstance(end, Completion)
        assert end.token_ids == step.wanted
    last = engine.model.saved
    assert last is not None
    assert last.damaged
    assert not last.loaded, "no damaged file is used"
