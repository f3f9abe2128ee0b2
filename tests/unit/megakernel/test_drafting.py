"""What a launch that drafts is given, and which models have such launches."""

import numpy as np

from interpreter.quantised import FORMATS, formats_of, matrices_of
from plan.shapes import LANEFORMER, MIXTURE, SMALL
from soloist.megakernel.drafting import DraftingLaunch, drafts
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.kv_format import kv_format
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


def test_models_of_kinds_that_no_gpu_has_shown_have_no_such_launches() -> None:
    gpu, dtype = TYPICAL["sm_90a"], Dtype.BF16
    assert all(drafts(make_plan(SMALL, dtype, gpu, ranks)) for ranks in (1, 2))
    assert not drafts(make_plan(SMALL, Dtype.FP16, gpu))
    for name, is_shown in (("int8", True), ("fp8", False)):
        codes = formats_of(dict.fromkeys(matrices_of(SMALL), FORMATS[name]))
        assert drafts(make_plan(SMALL, dtype, gpu, formats=codes)) == is_shown, name
    assert not drafts(make_plan(SMALL, dtype, gpu, kv=kv_format("fp8", SMALL, dtype)))
    assert not drafts(make_plan(read_config(MIXTURE), dtype, gpu))
    assert not drafts(make_plan(read_config(LANEFORMER), dtype, gpu))
