"""Constrained answers over the decode kernel: masks in time, forced tokens at once."""

import numpy as np
import pytest

from soloist.engine.core import tokens_of
from soloist.engine.executor import Picked
from soloist.engine.request import Request
from soloist.errors import GrammarFailed
from soloist.sampling import Sampler, SamplingParams
from unit.engine.fakes import VOCAB, logits_after, opened
from unit.engine.test_kernel import EOS, Parts, parts, prompt_of
from unit.sampling.constraints import Drawn, Steps

PARAMS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=1.3, seed=4),
    "penalties": SamplingParams(max_tokens=40, temperature=0.9, seed=5, frequency_penalty=0.8),
    "min-tokens": SamplingParams(max_tokens=40, min_tokens=20),
    "short": SamplingParams(max_tokens=13),
}


def steps(seed: int) -> Steps:
    """Spans of 0 to 19 forced tokens, between places where three tokens are allowed."""
    rng = np.random.default_rng(seed)
    sets: list[set[int]] = []
    while len(sets) < 35:
        sets += [{int(i)} for i in rng.integers(4, VOCAB, size=rng.integers(20))]
        sets += [{int(i) for i in rng.integers(4, VOCAB, size=3)}]
    return Steps(VOCAB, sets)


def sampler_of(prompt, params, constraint) -> Sampler:
    return Sampler(params, VOCAB, prompt, EOS, constraint)


def expected(prompt, params, constraint) -> list[int]:
    """The definition: every token chosen under its mask, one after the other."""
    sampler, made = sampler_of(prompt, params, constraint), []
    while not sampler.is_complete:
        made.append(sampler.pick(logits_after(prompt + made), len(prompt) + len(made)))
        sampler.observe(made[-1])
        if sampler.stop_test.finish_reason(made[-1], len(made)) is not None:
            break
    return made


def answer(p: Parts, prompt, sampler: Sampler) -> list[int]:
    made = []
    source = tokens_of(p.executor, Request(prompt, sampler))
    for token_id in source:
        made.append(token_id)
        if sampler.stop_test.finish_reason(token_id, len(made)) is not None:
            break
    source.close()
    assert not p.decoder.is_running
    return made


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("length", [1, 9, 30])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_definition(length, params, seed) -> None:
    prompt = prompt_of(length)
    for make in (steps, lambda n: Drawn(VOCAB, n, share=0.1)):
        wanted = expected(prompt, params, make(seed))
        assert answer(parts(), prompt, sampler_of(prompt, params, make(seed))) == wanted


def test_many_forced_tokens_ride_and_few_do_not() -> None:
    prompt = prompt_of(30)
    few = Steps(VOCAB, [{5, 6}, {7, 8}, {9}, {9}, {9}, {5, 6}, {5, 6}])
    p = parts()
    made = answer(p, prompt, sampler_of(prompt, PARAMS["greedy"], few))
    assert len(made) == 7
    assert len(p.decoder.launches) == 1
    many = Steps(VOCAB, [{5, 6}, {7, 8}, *[{9}] * 19, {5, 6}, {5, 6}])
    p = parts()
    made = answer(p, prompt, sampler_of(prompt, PARAMS["greedy"], many))
    assert len(made) == 23
    first, whole, rest, last = p.decoder.launches
    assert [len(x.queries) for x in (first, whole, rest, last)] == [1, 8, 3, 1]
    assert [x.rounds for x in (whole, rest)] == [2, 1]
    assert [c.position for c in whole.queries] == list(range(31, 39))
    assert [c.position for c in rest.queries] == list(range(47, 50))
    assert last.queries[0].position == 30 + 2 + 19 - 1
    assert p.decoder.num_rounds == 2 + 2 + 1 + 3, "a round more runs behind a span, and the end"


def test_forced_tokens_at_the_beginning_need_no_round() -> None:
    p, prompt = parts(), prompt_of(30)
    running = opened(
        p.executor,
        prompt,
        sampler_of(prompt, PARAMS["greedy"], Steps(VOCAB, [{9}, {10}, {11}, {5, 6}])),
    )
    assert p.executor.read(running) == Picked(9, forced=(10, 11))
    assert not p.decoder.launches
    p.executor.free(running)


def test_log_probabilities_change_no_token() -> None:
    prompt = prompt_of(30)
    for seed in range(3):
        p = parts()
        running = opened(
            p.executor, prompt, sampler_of(prompt, PARAMS["sampled"], steps(seed)), top_logprobs=2
        )
        picked = p.executor.read(running)
        made = [picked]
        while not running.has_all_tokens:
            made += [o for (o,) in p.executor.rounds([running], 50)]
        assert [x.token_id for x in made] == expected(prompt, PARAMS["sampled"], steps(seed))
        assert all(x.logprobs is not None and not x.forced for x in made)


def is_over(running) -> bool:
    return running.has_all_tokens or running.last in running.sampler.stop_test.ending_ids


def test_others_go_on_while_one_answer_is_forced() -> None:
    prompts = [prompt_of(30, s) for s in range(3)]
    free = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=8)

    def samplers():
        made = [sampler_of(prompts[0], PARAMS["sampled"], steps(1))]
        made += [sampler_of(prompts[1], free, None)]
        return [*made, sampler_of(prompts[2], PARAMS["greedy"], Drawn(VOCAB, 3, share=0.1))]

    alone = [answer(parts(), q, s) for q, s in zip(prompts, samplers(), strict=True)]
    p = parts(sequences=3)
    running = [opened(p.executor, q, s) for q, s in zip(prompts, samplers(), strict=True)]
    made: list[list[int]] = []
    for r in running:
        while (picked := p.executor.read(r)) is None:
            pass
        made.append(list(picked.token_ids))

    while going := [n for n, r in enumerate(running) if not is_over(r)]:
        for outcomes in p.executor.rounds([running[n] for n in going], 50):
            for n, outcome in zip(going, outcomes, strict=True):
                made[n] += () if outcome is None else outcome.token_ids
            if any(is_over(running[n]) for n in going):
                break
    assert made == alone
    for r in running:
        p.executor.free(r)


def test_a_constraint_that_fails_ends_its_request_alone() -> None:
    prompts = [prompt_of(30, s) for s in range(2)]
    dead = Steps(VOCAB, [{5, 6}, {7, 8}, set(), {5, 6}])
    p = parts(sequences=2)
    running = [
        opened(p.executor, prompts[0], sampler_of(prompts[0], PARAMS["greedy"], dead)),
        opened(p.executor, prompts[1], sampler_of(prompts[1], PARAMS["greedy"], Drawn(VOCAB, 1))),
    ]
    for r in running:
        assert p.executor.read(r) is not None
    outcomes = list(p.executor.rounds(running, 20))
    assert isinstance(outcomes[0][0], GrammarFailed), "it is known as soon as the token is"
    assert all(isinstance(o[0], GrammarFailed) for o in outcomes)
    assert all(isinstance(o[1], Picked) for o in outcomes)
    assert not p.decoder.is_running
    failed, other = next(iter(p.executor.rounds(running, 20)))
    assert isinstance(failed, GrammarFailed)
    assert other is None


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["sampled"]])
@pytest.mark.parametrize("length", [9, 30])
def test_a_request_that_is_paused_goes_on_with_the_same_tokens(length, params) -> None:
    """Also where forced tokens were not fed yet."""
    prompt = prompt_of(length)
    for seed in range(4):
        p, made, num_behind = parts(), [], 0
        running = opened(p.executor, prompt, sampler_of(prompt, params, steps(seed)))
        while not (made and is_over(running)):
            while not running.is_read:
                if (picked := p.executor.read(running)) is not None:
                    made += picked.token_ids
            if not is_over(running):
                for (outcome,) in p.executor.rounds([running], 3):
                    made += () if outcome is None else outcome.token_ids
            num_behind += running.num_behind
            if not is_over(running):
                p.executor.preempt(running)
                assert p.executor.open(running)
        assert made == expected(prompt, params, steps(seed))
        assert num_behind > 0
