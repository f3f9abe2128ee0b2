"""Launches that draft make the tokens of launches that do not, from the same logits."""

import random
from collections.abc import Sequence

import pytest
import torch

from interpreter.models import Bench, Launch, configured, prompt
from soloist.megakernel.interpreter.drafting import (
    DraftedTokens,
    DraftingLaunch,
    DraftingSequence,
)
from soloist.speculation import Archive, Costs, Drafter, Drafting
from unit.prefill.models import random_weights

PROMPT_TOKENS, TOKENS = 60, 24  # over the end of a page
DRAFTING = Drafting(Costs(tuple(1010 + 10 * k for k in range(7))), looks_up=True)


@pytest.fixture(scope="module", params=["qwen3-norms-128", "mistral-window-96"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    config, plan = configured(request.param, tmp_path_factory.mktemp("model"))
    return Bench(config, plan, random_weights(config))


def read(bench: Bench, sequence: int) -> tuple[list[int], int]:
    """A prompt in its pages, and the first token behind it."""
    ids = prompt(bench.plan.model, PROMPT_TOKENS)
    return ids, int(bench.feed(ids, 8, sequence)[-1].argmax())


def launched(bench: Bench) -> Launch:
    launch = bench.launch()
    assert isinstance(launch, Launch)
    return launch


@pytest.fixture(scope="module")
def plain(bench: Bench) -> tuple[list[int], torch.Tensor]:
    """The answer behind its first token, a round each, and its logits."""
    ids, token = read(bench, 0)
    launch, tokens, logits = launched(bench), list[int](), []
    for step in range(TOKENS):
        found, chosen = launch.round([token], [0], [len(ids) + step])
        token = chosen[0]
        tokens.append(token)
        logits.append(found)
    return tokens, torch.cat(logits)


def drafted(
    bench: Bench, prediction: Sequence[int] | None, archive: Archive, stops: Sequence[int] = ()
) -> list[DraftedTokens]:
    one = sequence(bench, 1, prediction, archive, stops)
    return [made for (made,) in DraftingLaunch(launched(bench).ranks, [one]).rounds()]


def sequence(
    bench: Bench,
    row: int,
    prediction: Sequence[int] | None,
    archive: Archive,
    stops: Sequence[int] = (),
) -> DraftingSequence:
    ids, first = read(bench, row)
    drafter = Drafter(DRAFTING, ids, prediction, archive)
    return DraftingSequence(drafter, row, len(ids), [first], TOKENS, stops)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_change_no_token(
    bench: Bench, plain: tuple[list[int], torch.Tensor], wrong: float
) -> None:
    tokens, logits = plain
    rng = random.Random(5)
    first = read(bench, 2)[1]
    predicted = [first, *(rng.randrange(50) if rng.random() < wrong else t for t in tokens)]
    rounds = drafted(bench, predicted, Archive())
    assert [token for made in rounds for token in made.tokens] == tokens
    seen = torch.cat([made.logits for made in rounds])
    torch.testing.assert_close(seen, logits, rtol=0, atol=1e-4)
    if wrong == 0.0:
        assert len(rounds) == -(-TOKENS // 8)


def test_an_earlier_answer_is_drafted_from(
    bench: Bench, plain: tuple[list[int], torch.Tensor]
) -> None:
    tokens, _ = plain
    archive = Archive()
    archive.add([read(bench, 2)[1], *tokens])
    rounds = drafted(bench, None, archive)
    assert [token for made in rounds for token in made.tokens] == tokens
    assert sum(made.num_drafted for made in rounds) > 0
    assert len(rounds) < TOKENS


def test_a_stop_within_a_draft_ends_the_launch(
    bench: Bench, plain: tuple[list[int], torch.Tensor]
) -> None:
    tokens, _ = plain
    stop = tokens[10]
    first = read(bench, 2)[1]
    rounds = drafted(bench, [first, *tokens], Archive(), [stop])
    wanted = tokens[: tokens.index(stop) + 1]
    assert [token for made in rounds for token in made.tokens] == wanted


@pytest.mark.parametrize("wrong", [(0.0, 0.0, 0.0), (0.0, 0.3, 1.0)])
def test_sequences_side_by_side_change_no_token(
    bench: Bench, plain: tuple[list[int], torch.Tensor], wrong: tuple[float, ...]
) -> None:
    """Five of eight queries are drafts of three sequences."""
    tokens, logits = plain
    rng = random.Random(6)
    first = read(bench, 0)[1]
    predictions = [
        [first, *(rng.randrange(50) if rng.random() < share else t for t in tokens)]
        for share in wrong
    ]
    sequences = [sequence(bench, row, x, Archive()) for row, x in enumerate(predictions)]
    rounds = list(DraftingLaunch(launched(bench).ranks, sequences).rounds())
    for number, one in enumerate(sequences):
        made = [of_round[number] for of_round in rounds]
        count = len(one.output_ids) - 1
        assert one.output_ids[1:] == tokens[:count]
        seen = torch.cat([x.logits for x in made])
        torch.testing.assert_close(seen, logits[:count], rtol=0, atol=1e-4)
    assert max(sum(made.num_drafted for made in of_round) for of_round in rounds) == 5


def test_a_sequence_without_drafts_leaves_others_fewer_queries(
    bench: Bench, plain: tuple[list[int], torch.Tensor]
) -> None:
    tokens, _ = plain
    first = read(bench, 0)[1]
    right = [first, *tokens]
    sequences = [sequence(bench, row, x, Archive()) for row, x in enumerate((right, None, None))]
    rounds = list(DraftingLaunch(launched(bench).ranks, sequences, 5).rounds())
    for one in sequences:
        assert one.output_ids[1:] == tokens[: len(one.output_ids) - 1]
    drafted = [[made.num_drafted for made in of_round] for of_round in rounds]
    assert drafted[0] == [2, 0, 0]
    assert all(sum(counts) <= (5 if all(counts) else 2) for counts in drafted)
