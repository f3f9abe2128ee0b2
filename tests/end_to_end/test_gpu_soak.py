"""Minutes of requests and thousands of tokens: no hang, no leak, no wrong token.

Run with `-m slow`. Over two GPUs, or two ranks that share one; on one GPU with weights in int4 and
in FP8, and room for half of what its requests may come to; and a mixture of experts. Most requests
have a prediction, right or wrong.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from end_to_end.test_experts import write_mixture
from soloist.engine import Chunk, Completion, Engine, EngineConfig, Request
from soloist.engine import engine as module
from soloist.engine.config import resolve
from soloist.engine.kernel import KernelModel
from soloist.engine.loop import EngineLoop
from soloist.megakernel.launch import Query
from soloist.megakernel.ranks import Ranks
from soloist.model.quantized import Codes
from soloist.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SOAK_S = 300.0
ROUNDED = {"int4": Codes.INT4, "fp8": Codes.FP8}
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
def engine(kind: str) -> Engine:
    asked = EngineConfig(
        "etude", device="cuda", context_tokens=2048, sequences=4, keeps_prefixes=True
    )
    if kind == "ranks":
        where = {"gpus": 2} if torch.cuda.device_count() > 1 else {"rank_devices": (0, 0)}
        return Engine.load(replace(asked, **where))
    if kind == "experts":
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "max_position_embeddings": 4096}
        with TemporaryDirectory() as folder:
            mixture = write_mixture(Path(folder) / "mixture", **sizes)
            return Engine.load(replace(asked, model=str(mixture), precision="bf16"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "resolve", lambda *given: replace(resolve(*given), kv_tokens=2048))
        return Engine.load(replace(asked, weights=ROUNDED[kind]))


def predicted(rng: random.Random, answer: Sequence[int]) -> list[int] | None:
    """A prediction: none, the answer, the answer with an edit, or something else."""
    kind = rng.choice(("none", "right", "wrong", "edited", "other"))
    if kind == "none":
        return None
    if kind == "other":
        return [rng.randrange(8000) for _ in range(rng.randint(1, 200))]
    wrong = 0.1 if kind == "wrong" else 0.0
    made = [rng.randrange(8000) if rng.random() < wrong else token for token in answer]
    if kind == "edited":
        at = rng.randrange(len(made))
        made[at : at + rng.randint(0, 20)] = [rng.randrange(8000) for _ in range(rng.randint(0, 9))]
    return made or None


def held_bytes() -> int:
    return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))


class Asked:
    """One request, and what is to become of it."""

    def __init__(self, ticket: Request, wanted: tuple[int, ...], cancel_at: int | None) -> None:
        self.ticket, self.wanted, self.cancel_at = ticket, wanted, cancel_at
        self.since, self.seen, self.is_over = time.monotonic(), 0, False
        self.num_accepted = 0

    def look(self) -> None:
        """Take what has come; tokens are those that the same request got alone."""
        for event in self.ticket.take():
            if isinstance(event, Completion):
                made, self.is_over = event.token_ids, True
                self.num_accepted = event.timings.drafts.predicted_accepted
                assert made == self.wanted[: len(made)]
                assert self.cancel_at is not None or len(made) == len(self.wanted)
            else:
                assert isinstance(event, Chunk), event
                self.seen += len(event.token_ids)
        if self.cancel_at is not None and self.seen >= self.cancel_at:
            self.ticket.cancel()
        assert time.monotonic() - self.since < 60, "it hangs"


def soak(loop: EngineLoop, own: Engine, seconds: float, rng: random.Random) -> tuple[int, int]:
    """Requests of random lengths, up to six at a time, a third of them cancelled.

    Half of the time there is one at a time. Returns how many there were, and how many of their
    tokens were predicted.
    """
    kinds = [(own.tokenizer.encode(text), params) for text in PROMPTS for params in PARAMS]
    alone: list[tuple[int, ...]] = []
    for ids, params in kinds:
        ticket, made = loop.submit(ids, params), None
        while made is None:
            ends = [e.token_ids for e in ticket.take() if isinstance(e, Completion)]
            made = ends[0] if ends else None
            time.sleep(0.001)
        alone.append(made)
    until, count, num_accepted, open_now = time.monotonic() + seconds, 0, 0, list[Asked]()
    while open_now or time.monotonic() < until:
        most = 1 if count // 20 % 2 else rng.randint(1, 6)
        if len(open_now) < most and time.monotonic() < until:
            kind = rng.randrange(len(kinds))
            length = rng.choice((1, 2, rng.randint(3, 60), rng.randint(60, LONGEST)))
            params = replace(kinds[kind][1], max_tokens=length)
            cancel_at = rng.choice((None, None, rng.randint(0, length)))
            prediction = predicted(rng, alone[kind][:length])
            ticket = loop.submit(
                kinds[kind][0], params, prediction_ids=prediction,
                top_logprobs=rng.choice((None, None, 3)),
            )  # fmt: skip
            open_now.append(Asked(ticket, alone[kind][:length], cancel_at))
            count += 1
        for asked in open_now:
            asked.look()
        num_accepted += sum(asked.num_accepted for asked in open_now if asked.is_over)
        open_now = [asked for asked in open_now if not asked.is_over]
        time.sleep(0.0005)
    return count, num_accepted


@pytest.mark.parametrize("kind", ["ranks", *ROUNDED, "experts"])
def test_minutes_of_requests_with_random_lengths_and_cancels(kind: str) -> None:
    own = engine(kind)
    loop = EngineLoop(own.model, own.tokenizer, own.config.vocab_size)
    try:
        soak(loop, own, 5.0, random.Random(1))  # whatever is allocated once
        before = held_bytes()
        count, num_accepted = soak(loop, own, SOAK_S, random.Random(2))
        assert count > SOAK_S, "they came slowly"
        assert num_accepted > count, "predictions were followed"
        assert held_bytes() == before
        assert (loop.load.num_preemptions > 0) == (kind in ROUNDED)
        assert loop.load.num_running == loop.load.num_waiting == 0
    finally:
        loop.close()


def test_all_ranks_choose_alike_through_10_000_tokens() -> None:
    model = engine("ranks").model
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
