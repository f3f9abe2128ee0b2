"""What a launch that drafts is given."""

from typing import Any

import numpy as np

from soloist.megakernel.abi import LAUNCH
from soloist.megakernel.choice import Choice
from soloist.megakernel.drafting import DraftingLaunch, DraftingSequence
from soloist.megakernel.launch import LAUNCH_WORDS, Query, pack_drafting
from soloist.megakernel.limits import MAX_QUERIES
from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts
from soloist.speculation import NO_DRAFTS, Archive, Costs, Draft, Drafter, Drafting
from soloist.speculation.prediction import WEIGHTS

PROMPT = [*range(1000)]


def sequence(num_output: int, *, looks_up: bool) -> DraftingSequence:
    drafting, output = Drafting(Costs((1300,) * 7), looks_up), [*range(num_output)]
    drafter = Drafter(drafting, PROMPT, [*range(50)], Archive())
    draft = drafter.draft(output, 7)
    return DraftingSequence(drafter.state, draft, PROMPT, output, 20)


def start(given: DraftingSequence) -> Any:
    return given.start(0, dict.fromkeys(given.texts, 0))


def test_a_prediction_needs_no_more_than_the_latest_tokens() -> None:
    for num_output in (1, 5, len(WEIGHTS), 40):
        given = sequence(num_output, looks_up=False)
        drafter = start(given)["drafter"]
        assert list(given.history) == [*range(num_output)][-len(WEIGHTS) :]
        assert (drafter["num_prompt"], drafter["num_history"]) == (0, len(given.history))


def test_lookup_needs_all_of_the_text() -> None:
    given = sequence(40, looks_up=True)
    assert list(given.history) == [*PROMPT, *range(40)]
    assert start(given)["drafter"]["num_prompt"] == np.uint32(len(PROMPT))


def test_columns_of_sequences_follow_each_other() -> None:
    one, other = sequence(5, looks_up=False), sequence(5, looks_up=True)
    silent = DraftingSequence(NO_DRAFTS, None, PROMPT, [7], 9, [1, 2])
    launch = DraftingLaunch((one, silent, other), 20)
    assert one.draft_ids
    assert launch.columns == [
        0,
        1 + len(one.draft_ids),
        2 + len(one.draft_ids),
        3 + 2 * len(one.draft_ids),
    ]
    assert not launch.is_like(DraftingLaunch((one, silent), 20))
    assert not launch.is_like(DraftingLaunch((one, silent, other), 21))
    assert not launch.is_like(DraftingLaunch((one, silent, other), 20, 5))
    assert launch.is_like(DraftingLaunch((one, silent, other), 20))
    given = start(silent)
    assert (given["num_costs"], given["looks_up"], given["num_stops"]) == (0, 0, 2)
    assert given["drafter"]["count"] == 0


def test_a_launch_has_queries_for_all_drafts() -> None:
    drafts = [Draft((11, 12), "prediction", 0), None, Draft((13,), "lookup", 2)]
    sequences = tuple(DraftingSequence(NO_DRAFTS, x, PROMPT, [1], 9) for x in drafts)
    counts = TokenCounts(50, [])
    counts.add(4)
    choice = Choice(SamplingParams(temperature=1.0, seed=3), counts)
    queries = [
        Query(4, 100, [1], [7]), Query(5, 200, [2], [8, 9], choice=choice), Query(6, 300, [3])
    ]  # fmt: skip
    given = pack_drafting(queries, DraftingLaunch(sequences, 5), 50)
    (record,) = given.words[: LAUNCH.num_bytes // 4].view(LAUNCH.dtype)
    assert (record["queries"], record["rounds"], given.num_queries) == (6, 5, 6)
    tokens = given.words[LAUNCH_WORDS:].reshape(MAX_QUERIES, 5)
    assert tokens[:6, 0].tolist() == [1, 11, 12, 2, 3, 13]
    asked = record["query"]
    assert asked["sequence"][:6].tolist() == [4, 4, 4, 5, 6, 6]
    assert asked["position"].tolist() == [100, 101, 102, 200, 300, 301, 0, 0]
    assert asked["num_stops"][:6].tolist() == [1, 1, 1, 2, 0, 0]
    assert (asked["stride"] == 0).all()
    assert (asked["forced"] == 1).all(), "or a round without a score would not end the launch"
    assert record["sampling"]["history"][:6].tolist() == [0, 0, 0, 1, 2, 2]
    assert record["sampling"]["temperature"][:6].tolist() == [0, 0, 0, 1, 0, 0]
    assert record["step"]["position_low"][:6].tolist() == [101, 102, 103, 201, 301, 302]
    assert record["step"]["num_output"][:6].tolist() == [0, 1, 2, 1, 0, 1]
