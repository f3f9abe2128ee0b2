"""Several query tokens in each decode step: one launch, timed from outside."""

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from soloist.bench.contender import Run, gaps_s
from soloist.bench.params import fixed_params
from soloist.engine.kernel import KernelModel
from soloist.megakernel.choice import Choice
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.trace import chosen_experts
from soloist.sampling.adjust import TokenCounts


def run_columns(
    model: KernelModel,
    prompts: Sequence[list[int]],
    columns: int,
    start: int,
    new_tokens: int,
    temperature: float = 0.0,
) -> Run:
    """All prompts one after the other, the first one timed; then one launch for all columns.

    Every column goes on with the tokens that it chose itself.

    Args:
        model: that no request has used.
        prompts: of each sequence.
        columns: positions of a sequence in a step.
        start: position of the first step.
        new_tokens: steps.
        temperature: 0 is greedy; else the seed is 0, and noise belongs to a column's positions.
    """
    params = fixed_params(temperature, new_tokens)
    begun = time.perf_counter()
    first, choices = [], []
    for i, prompt in enumerate(prompts):
        logits = model.prefill.run_prompt(
            prompt, model.page_tables[i], model.prefill.most_tokens, lambda: False
        )
        assert logits is not None, "nobody cancels"
        first.append(int(logits.argmax()))
        choices.append(
            Choice(params, TokenCounts(len(logits), [*prompt, first[i]])) if temperature else None
        )
        if i == 0:
            ttft_s = time.perf_counter() - begun
    queries = [
        Query(s, start + c, [token_id], choice=choice)
        for s, (token_id, choice) in enumerate(zip(first, choices, strict=True))
        for c in range(columns)
    ]
    model.decoder.start(queries, new_tokens)
    made: list[int] = []
    times = []
    for tokens in model.decoder.tokens():
        times.append(time.perf_counter())
        made += tokens
    return Run(ttft_s, times[-1] - times[0], tuple(made), gaps_s(times))


def experts_of_columns(
    model: KernelModel, new_tokens: int, run: Callable[[int], Run]
) -> float | None:
    """Experts that all columns of a step together choose in a layer; None where there are none.

    Args:
        model: whose columns run.
        new_tokens: steps of a timed run. The mean over the layers is that of the middle step.
        run: `run_columns` for so many steps.
    """
    if not model.plan.has_experts:
        return None
    middle = new_tokens // 2
    model.decoder.load(Build(trace_round=middle))
    try:
        run(middle + 2)
        return round(fmean(chosen_experts(model.plan, model.decoder.trace[0].tolist())), 2)
    finally:
        model.decoder.load(Build())
