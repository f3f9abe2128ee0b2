"""Several query tokens in each decode step: one launch, timed from outside."""

import time
from collections.abc import Sequence

from soloist.bench.contender import Run, gaps_s
from soloist.engine.kernel import KernelModel
from soloist.megakernel.launch import Query


def run_columns(
    model: KernelModel, prompts: Sequence[list[int]], columns: int, start: int, new_tokens: int
) -> Run:
    """All prompts one after the other, the first one timed; then one launch for all columns.

    Every column goes on with the tokens that it chose itself.

    Args:
        model: that no request has used.
        prompts: of each sequence.
        columns: positions of a sequence in a step.
        start: position of the first step.
        new_tokens: steps.
    """
    begun = time.perf_counter()
    first = []
    for i, prompt in enumerate(prompts):
        logits = model.prefill.run_prompt(
            prompt, model.page_tables[i], model.prefill.most_tokens, lambda: False
        )
        assert logits is not None, "nobody cancels"
        first.append(int(logits.argmax()))
        if i == 0:
            ttft_s = time.perf_counter() - begun
    queries = [
        Query(s, start + c, [token_id]) for s, token_id in enumerate(first) for c in range(columns)
    ]
    model.decoder.start(queries, new_tokens)
    made: list[int] = []
    times = []
    for tokens in model.decoder.tokens():
        times.append(time.perf_counter())
        made += tokens
    return Run(ttft_s, times[-1] - times[0], tuple(made), gaps_s(times))
