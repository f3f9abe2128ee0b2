"""Prompts that are scored: the definition's numbers, beside others, cut and preempted."""

import math
import time
from collections.abc import Sequence

import pytest
import torch

from soloist.engine import Completion, Event, Failure, Request, Scored
from soloist.engine.executor import SCORED_TOKENS
from soloist.errors import BadLogits
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.logprobs import TokenLogprobs, logprobs, logprobs_of_rows
from soloist.sampling.params import Scores
from unit.engine.fakes import VOCAB, logits_after, opened
from unit.engine.test_kernel import EOS, PARAMS, expected, prompt_of
from unit.engine.test_loop import LONG, WAIT_S, all_at_once, ended, wait_for

SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


def events_of(ticket: Request) -> list[Event]:
    events: list[Event] = []
    until = time.monotonic() + WAIT_S
    while not (events and isinstance(events[-1], Completion | Failure)):
        assert time.monotonic() < until, "the request does not end"
        events += ticket.take()
        time.sleep(0.0005)
    return events


def defined(prompt: list[int], top: int) -> list[TokenLogprobs]:
    """One position after the other."""
    return [logprobs(logits_after(prompt[:n]), prompt[n], top) for n in range(1, len(prompt))]


def same(found: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs]) -> bool:
    """Up to the order of sums."""
    for a, b in zip(found, wanted, strict=True):
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        values = [a.chosen, *(x for _, x in a.top)]
        assert values == pytest.approx([b.chosen, *(x for _, x in b.top)], rel=1e-12, abs=1e-12)
    return True


@pytest.mark.parametrize("top", [0, 1, 5, 8])
def test_rows_at_once_are_rows_one_by_one(top: int) -> None:
    logits = torch.randn(40, 7, generator=torch.Generator().manual_seed(top)) * 9
    logits[3] = 1.0  # equal scores: the lowest ids first
    logits[4, 2:] = -torch.inf
    ids = [n % 7 for n in range(40)]
    ids[4] = 1
    found = logprobs_of_rows(logits, ids, 1, top)
    wanted = [logprobs(row, i, top) for row, i in zip(logits, ids, strict=True)]
    assert same((*found[:4], *found[5:]), (*wanted[:4], *wanted[5:]))
    assert found[4].chosen == pytest.approx(wanted[4].chosen)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_best_score_are_refused(bad: float) -> None:
    logits = torch.zeros(4, 7)
    logits[2, 3] = bad
    with pytest.raises(BadLogits, match="12"):
        logprobs_of_rows(logits, [0] * 4, 10, 2)


@pytest.mark.parametrize("keeps_prefixes", [False, True])
@pytest.mark.parametrize("scores", ["both", "prompt"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 64, 65, 150])
def test_scores_are_those_of_the_definition(
    parts, length: int, scores: Scores, keeps_prefixes: bool
) -> None:
    p, prompt = parts(keeps_prefixes=keeps_prefixes), prompt_of(length)
    for params in (SHORT, PARAMS["all"]):
        first, *rest = events_of(p.loop.submit(prompt, params, top_logprobs=3, scores=scores))
        assert isinstance(first, Scored)
        assert same(first.logprobs, defined(prompt, 3))
        end = rest.pop()
        assert isinstance(end, Completion)
        made = [] if scores == "prompt" else expected(prompt, params)
        assert list(end.token_ids) == made
        assert sum(len(chunk.logprobs) for chunk in rest) == len(made), "the last one's, too"
        assert end.finish_reason in (
            {"length"} if scores == "prompt" else {"length", "eos", "stop"}
        )
        assert end.timings.cached_tokens == 0
        assert end.timings.ttft_s > 0
        assert end.timings.prompt_tokens == length
    assert p.loop.cached.on_device == 0, "nothing of it is cached"
    assert p.num_free_pages == p.num_pages


def test_a_kept_prompt_is_read_again_to_be_scored(parts) -> None:
    p, prompt = parts(keeps_prefixes=True), prompt_of(200)
    ended(p.loop.submit(prompt, SHORT))
    assert p.loop.cached.on_device > 0
    first, *_ = events_of(p.loop.submit(prompt, SHORT, top_logprobs=0, scores="prompt"))
    assert same(first.logprobs, defined(prompt, 0))


def test_others_wait_for_one_piece_of_a_scored_prompt(parts) -> None:
    p = parts()
    stream = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=400, ignore_eos=True))
    wait_for(lambda: p.decoder.num_rounds > 3)
    at = len(p.decoder.launches)
    scored = p.loop.submit(prompt_of(300, seed=1), SHORT, top_logprobs=0, scores="prompt")
    assert isinstance(events_of(scored)[0], Scored)
    # Launches of one round read the scored prompt, 8 tokens each; others are of the stream.
    streak, longest = 0, 0
    for launch in p.decoder.launches[at:]:
        is_piece = launch.rounds == 1 and launch.queries[0].sequence != 0
        streak = streak + 1 if is_piece else 0
        longest = max(longest, streak)
    assert longest == SCORED_TOKENS // 8
    stream.cancel()
    ended(stream)


def test_a_scored_prompt_can_be_cancelled_while_it_is_read(parts) -> None:
    p, prompt = parts(), prompt_of(600)
    score = Request.score
    tickets: list[Request] = []

    def cancelled(running: Request, position: int, logits: torch.Tensor) -> None:
        score(running, position, logits)
        if position >= 64:
            wait_for(lambda: bool(tickets))
            tickets[0].cancel()

    Request.score = cancelled
    try:
        tickets.append(p.loop.submit(prompt, SHORT, top_logprobs=0, scores="prompt"))
        (end,) = events_of(tickets[0])
    finally:
        Request.score = score
    assert isinstance(end, Completion)
    assert end.finish_reason == "cancelled"
    assert p.decoder.num_rounds <= 2 * SCORED_TOKENS // 8
    wait_for(lambda: p.num_free_pages == p.num_pages)


def test_who_is_paused_is_read_again_in_the_same_way(parts) -> None:
    p = parts(pages=12, keeps_prefixes=True)
    asked = [(prompt_of(100, seed=n), params) for n, params in enumerate(LONG.values())]
    with all_at_once(p):
        tickets = [p.loop.submit(*one, top_logprobs=2, scores="both") for one in asked]
    for ticket, (prompt, params) in zip(tickets, asked, strict=True):
        scored, *chunks, end = events_of(ticket)
        assert isinstance(scored, Scored)
        assert same(scored.logprobs, defined(prompt, 2))
        assert not any(isinstance(chunk, Scored) for chunk in chunks), "once"
        assert list(end.token_ids) == expected(prompt, params)
    assert p.loop.load.num_preemptions >= 2
    assert not p.prefill.chunks, "all their keys and values come from the kernel"


def test_a_sequence_that_is_paused_midway_keeps_its_scores(parts) -> None:
    p, prompt = parts(), prompt_of(200)
    p.loop.close()
    running = opened(
        p.executor, prompt, Sampler(SHORT, VOCAB, prompt, EOS), top_logprobs=1, scores="both"
    )
    for _ in range(2):
        assert p.executor.read(running) is None
    p.executor.preempt(running)
    assert p.executor.open(running)
    while (picked := p.executor.read(running)) is None:
        pass
    assert picked.token_id == expected(prompt, SHORT)[0]
    assert same(tuple(running.prompt_scores), defined(prompt, 1))
    p.executor.free(running)


def test_scores_without_a_best_one_fail_the_request_alone(parts) -> None:
    p = parts()
    p.cache.bad = math.nan
    (failure,) = events_of(p.loop.submit(prompt_of(30), SHORT, top_logprobs=0, scores="prompt"))
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, BadLogits)
    p.cache.bad = None
    prompt = prompt_of(20)
    assert ended(p.loop.submit(prompt, SHORT))[1] == expected(prompt, SHORT)
