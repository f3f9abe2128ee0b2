"""Which positions of which sequences a launch begins with, and what counts as made."""

from types import SimpleNamespace

import torch

from soloist.bench.columns import run_columns
from soloist.megakernel.launch import Query


def test_every_sequence_has_its_columns_from_the_start_on() -> None:
    asked = []

    def run_prompt(prompt, table, _chunk, _cancelled) -> torch.Tensor:
        asked.append((prompt, table))
        return torch.nn.functional.one_hot(torch.tensor(sum(prompt)), 10)

    model = SimpleNamespace(
        prefill=SimpleNamespace(run_prompt=run_prompt, most_tokens=512),
        page_tables=[[0, 1], [2, 3]],
        decoder=SimpleNamespace(
            start=lambda queries, rounds: asked.append((queries, rounds)),
            tokens=lambda: iter([[1, 2, 3, 4], [5, 6, 7, 8]]),
        ),
    )
    run = run_columns(model, [[1, 2], [3, 4]], 2, 40, 2)
    queries = [Query(0, 40, [3]), Query(0, 41, [3]), Query(1, 40, [7]), Query(1, 41, [7])]
    assert asked == [([1, 2], [0, 1]), ([3, 4], [2, 3]), (queries, 2)]
    assert run.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    asked.clear()
    run_columns(model, [[1, 2]], 2, 40, 2, temperature=0.5)
    sampled, _ = asked[-1]
    assert [query.choice.params.temperature for query in sampled] == [0.5, 0.5]
    assert [query.choice.params.seed for query in sampled] == [0, 0]
    assert list(sampled[0].choice.counts.prompt_ids) == [1, 2, 3], "prompt and first input token"
