"""What a launch that drafts is given, and which models have such launches."""

import numpy as np

from soloist.megakernel.drafting import DraftingLaunch
from soloist.speculation import Archive, Costs, Drafter, Drafting
from soloist.speculation.prediction import WEIGHTS

PROMPT = [*range(1000)]


def launch(num_output: int, *, looks_up: bool) -> DraftingLaunch:
    drafting, output = Drafting(Costs((1300,) * 7), looks_up), [*range(num_output)]
    drafter = Drafter(drafting, PROMPT, [*range(50)], Archive())
    draft = drafter.draft(output, 7)
    return DraftingLaunch(drafter.state, draft, PROMPT, output, 20)


def test_a_prediction_needs_no_more_than_the_latest_tokens() -> None:
    for num_output in (1, 5, len(WEIGHTS), 40):
        given = launch(num_output, looks_up=False)
        drafter = given.start["drafter"]
        assert list(given.history) == [*range(num_output)][-len(WEIGHTS) :]
        assert (drafter["num_prompt"], drafter["num_history"]) == (0, len(given.history))


def test_lookup_needs_all_of_the_text() -> None:
    given = launch(40, looks_up=True)
    assert list(given.history) == [*PROMPT, *range(40)]
    assert given.start["drafter"]["num_prompt"] == np.uint32(len(PROMPT))
