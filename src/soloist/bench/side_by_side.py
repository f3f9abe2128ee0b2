"""Requests that decode side by side, through the engine's core: their speeds together."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from soloist.bench.contender import Run, gaps_s
from soloist.bench.params import fixed_params
from soloist.engine import Engine
from soloist.engine.core import EngineCore
from soloist.engine.events import Chunk, Completion, Failure
from soloist.engine.request import Request
from soloist.sampling import Sampler


def run_requests(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float,
    predictions: Sequence[Sequence[int] | None],
    predicted: int,
) -> tuple[Run, list[tuple[int, ...]]]:
    """Answer all prompts at once; what became of them together, and each answer.

    The run's `decode_s` is that of a request with the mean of all speeds, its `ttft_s` the last
    one's, and its tokens are those of all, one after the other.

    Args:
        engine: with room for so many requests.
        prompts: no two alike.
        new_tokens: of each.
        temperature: 0 is greedy; else each has a seed of its own.
        predictions: of each; None without.
        predicted: of the requests, the first ones; the others are timed apart (`Run`).
    """
    core = EngineCore(engine.model)
    requests = []
    for number, (ids, prediction) in enumerate(zip(prompts, predictions, strict=True)):
        params = fixed_params(temperature, new_tokens)
        if params.seed is not None:
            params = replace(params, seed=number)
        sampler = Sampler(params, engine.config.vocab_size, ids)
        request = Request(ids, sampler, drafter=engine.model.drafter(ids, prediction))
        requests.append(request)
        core.submit(request)
    ends: list[Completion | None] = [None] * len(requests)
    times: list[list[float]] = [[] for _ in requests]
    rounds = list[tuple[float, list[int]]]()
    while (step := core.next()) is not None:
        for _ in core.do(step):
            now = time.perf_counter()
            rounds.append((now, [len(r.sampler.output_ids) for r in requests]))
            for number, request in enumerate(requests):
                for event in request.take():
                    if isinstance(event, Failure):
                        raise event.error
                    if isinstance(event, Completion):
                        ends[number] = event
                    elif isinstance(event, Chunk) and event.token_ids:
                        times[number].append(now)
    done = [end for end in ends if end is not None]
    assert len(done) == len(requests), "a request ends with a completion"
    timings = [end.timings for end in done]
    drafted = sum(t.drafts.drafted for t in timings)
    accepted = sum(t.drafts.accepted for t in timings)
    run = Run(
        max(t.ttft_s for t in timings),
        1 / mean(1 / t.decode_s for t in timings),
        tuple(token_id for end in done for token_id in end.token_ids),
        tuple(gap for of_one in times for gap in gaps_s(of_one)),
        mean(t.tokens_per_round or 1 for t in timings) if engine.model.drafting else None,
        accepted / drafted if drafted else None,
        _speed_beside(rounds, new_tokens, predicted),
    )
    return run, [end.token_ids for end in done]


def _speed_beside(
    rounds: Sequence[tuple[float, list[int]]], new_tokens: int, predicted: int
) -> float | None:
    """Mean tokens/s of the requests from `predicted` on, while all decode.

    Args:
        rounds: when each was over, and how many tokens each request had then.
        new_tokens: that each has in the end.
        predicted: number of the first request that counts.
    """
    together = [(at, made) for at, made in rounds if min(made) > 0 and max(made) < new_tokens]
    if len(together) < 2:
        return None
    (begin_s, begun), (end_s, ended) = together[0], together[-1]
    counts = [b - a for a, b in zip(begun, ended, strict=True)][predicted:]
    return mean(counts) / (end_s - begin_s) if counts else None
