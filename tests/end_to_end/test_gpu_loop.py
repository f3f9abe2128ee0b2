"""Requests side by side on the decode kernel: the answers of each alone."""

import time
from functools import cache

import pytest

from soloist.engine import Completion, Engine, EngineConfig, EngineLoop, Ticket
from soloist.sampling import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [
    "def fibonacci(n):\n", "import os\n" * 30, "class Point:\n", "x = 1\n" * 300, "for i in",
    "def add(a, b):\n    return a + b\n" * 60, "while True:", "print('hello')\n",
]  # fmt: skip
PARAMS = [
    SamplingParams(max_tokens=300, ignore_eos=True),
    SamplingParams(max_tokens=200, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=250, repetition_penalty=1.2, frequency_penalty=0.2, ignore_eos=True),
    SamplingParams(max_tokens=100, logit_bias={11: 3.0}, min_tokens=50),
]


@cache
def engine() -> Engine:
    asked = EngineConfig(
        "etude", device="cuda", context_tokens=4096, sequences=8, keeps_prefixes=True
    )
    return Engine.load(asked)


def all_of(loop: EngineLoop, ids: list[int], params: SamplingParams) -> list[object]:
    ticket, events = loop.submit(ids, params, top_logprobs=3), []
    while not events or not isinstance(events[-1], Completion):
        events += ticket.take()
        time.sleep(0.0005)
    return events


def end_of(ticket: Ticket) -> Completion:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for event in ticket.take():
            if isinstance(event, Completion):
                return event
        time.sleep(0.0005)
    raise AssertionError("the request does not end")


def test_requests_side_by_side_are_those_alone() -> None:
    asked = [(engine().tokenizer.encode(x), PARAMS[i % 4]) for i, x in enumerate(PROMPTS * 2)]
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    alone = [end_of(loop.submit(*x)) for x in asked]
    tickets = [loop.submit(*x) for x in asked]
    for before, ticket in zip(alone, tickets, strict=True):
        assert end_of(ticket).token_ids == before.token_ids
    cut = loop.submit(asked[0][0], SamplingParams(max_tokens=3000, ignore_eos=True))
    time.sleep(0.05)
    cut.cancel()
    assert len(end_of(cut).token_ids) < 3000
    loop.close()
    *_, end = engine().generate(asked[0][0], PARAMS[0])
    assert end.token_ids == alone[0].token_ids, "the device is free again"


def test_log_probabilities_change_no_token() -> None:
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    ids = engine().tokenizer.encode(PROMPTS[1])
    plain = end_of(loop.submit(ids, PARAMS[0]))
    *chunks, end = all_of(loop, ids, PARAMS[0])
    loop.close()
    assert end.token_ids == plain.token_ids
    for chunk in (c for c in chunks if c.token_ids):
        assert chunk.logprobs[0].top[0][0] == chunk.token_ids[0], "greedy takes the likeliest"


def test_a_kept_prompt_gives_the_bits_of_one_that_is_read() -> None:
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    text = "".join(f"def f_{i}(x):\n    return x + {i}\n" for i in range(200))
    ids = engine().tokenizer.encode(text)[:1500]
    *first, miss = all_of(loop, ids, PARAMS[0])
    *again, hit = all_of(loop, ids, PARAMS[0])
    loop.close()
    assert miss.timings.cached_tokens == 0
    assert hit.timings.cached_tokens == 1024
    assert again == first, "tokens and log probabilities, to the last bit"
    assert hit.timings.ttft_s < miss.timings.ttft_s
