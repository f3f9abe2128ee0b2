"""Minutes of requests and thousands of tokens over two GPUs: no hang, no leak, no wrong token.

Run with `-m slow`; where there is one GPU, two ranks share it.
"""

import random
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from soloist.engine import Chunk, Completion, Engine, EngineConfig, Request
from soloist.engine.kernel import KernelModel
from soloist.engine.loop import EngineLoop
from soloist.megakernel.launch import Query
from soloist.megakernel.ranks import Ranks
from soloist.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SOAK_S = 300.0
LONGEST = 600
PROMPTS = (
    "def f(", "import os\n" * 3, "class Point:\n    x = 1\n" * 20, "x = 1\n" * 150,
    "for i in range(10):\n    print(i)\n" * 40,
)  # fmt: skip
PARAMS = (
    SamplingParams(max_tokens=LONGEST, ignore_eos=True),
    SamplingParams(max_tokens=LONGEST, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=LONGEST, repetition_penalty=1.1, ignore_eos=True),
)


@cache
def engine() -> Engine:
    where = {"gpus": 2} if torch.cuda.device_count() > 1 else {"rank_devices": (0, 0)}
    asked = EngineConfig(
        "etude", device="cuda", context_tokens=4096, sequences=4, keeps_prefixes=True, **where
    )
    return Engine.load(asked)


def held_bytes() -> int:
    return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))


class Asked:
    """One request, and what is to become of it."""

    def __init__(self, ticket: Request, wanted: tuple[int, ...], cancel_at: int | None) -> None:
        self.ticket, self.wanted, self.cancel_at = ticket, wanted, cancel_at
        self.since, self.seen, self.is_over = time.monotonic(), 0, False

    def look(self) -> None:
        """Take what has come; tokens are those that the same request got alone."""
        for event in self.ticket.take():
            if isinstance(event, Completion):
                made, self.is_over = event.token_ids, True
                assert made == self.wanted[: len(made)]
                assert self.cancel_at is not None or len(made) == len(self.wanted)
            else:
                assert isinstance(event, Chunk), event
                self.seen += len(event.token_ids)
        if self.cancel_at is not None and self.seen >= self.cancel_at:
            self.ticket.cancel()
        assert time.monotonic() - self.since < 60, "it hangs"


def soak(loop: EngineLoop, own: Engine, seconds: float, rng: random.Random) -> int:
    """Requests of random lengths, up to six at a time, a third of them cancelled; their number."""
    kinds = [(own.tokenizer.encode(text), params) for text in PROMPTS for params in PARAMS]
    alone: list[tuple[int, ...]] = []
    for ids, params in kinds:
        ticket, made = loop.submit(ids, params), None
        while made is None:
            ends = [e.token_ids for e in ticket.take() if isinstance(e, Completion)]
            made = ends[0] if ends else None
            time.sleep(0.001)
        alone.append(made)
    until, count, open_now = time.monotonic() + seconds, 0, list[Asked]()
    while open_now or time.monotonic() < until:
        if len(open_now) < rng.randint(1, 6) and time.monotonic() < until:
            kind = rng.randrange(len(kinds))
            length = rng.choice((1, 2, rng.randint(3, 60), rng.randint(60, LONGEST)))
            params = replace(kinds[kind][1], max_tokens=length)
            cancel_at = rng.choice((None, None, rng.randint(0, length)))
            ticket = loop.submit(kinds[kind][0], params)
            open_now.append(Asked(ticket, alone[kind][:length], cancel_at))
            count += 1
        for asked in open_now:
            asked.look()
        open_now = [asked for asked in open_now if not asked.is_over]
        time.sleep(0.0005)
    return count


def test_minutes_of_requests_with_random_lengths_and_cancels() -> None:
    own = engine()
    loop = EngineLoop(own.model, own.tokenizer, own.config.vocab_size)
    try:
        soak(loop, own, 5.0, random.Random(1))  # whatever is allocated once
        before = held_bytes()
        count = soak(loop, own, SOAK_S, random.Random(2))
        assert count > SOAK_S, "they came slowly"
        assert held_bytes() == before
        assert loop.load.num_running == loop.load.num_waiting == 0
    finally:
        loop.close()


def test_all_ranks_choose_alike_through_10_000_tokens() -> None:
    model = engine().model
    assert isinstance(model, KernelModel)
    ranks = model.decoder
    assert isinstance(ranks, Ranks)
    made = 0
    while made < 10_000:
        count = min(ranks.max_rounds, 1000)
        tokens = ranks.run([Query(0, made % 3000, [made % 8000])], count)
        assert len(tokens) == count
        first, *others = [d._shown[:count, 0].tolist() for d in ranks.decoders]
        assert first == [token for (token,) in tokens]
        assert all(other == first for other in others)
        made += count
