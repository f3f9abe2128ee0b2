"""Predictions and lookup on the decode kernel: the answers without them, in fewer rounds."""

import random
from dataclasses import replace

import pytest

from end_to_end.test_gpu_loop import PARAMS, PROMPTS, engine, events_of
from soloist.engine import Chunk, Completion
from soloist.engine.drafting import PREDICTIONS
from soloist.engine.kernel import KernelModel
from soloist.engine.loop import EngineLoop
from soloist.sampling import SamplingParams

pytestmark = pytest.mark.gpu


def answer(loop: EngineLoop, ids: list[int], params: SamplingParams, **more: object):
    """All that a client sees but times."""
    events = events_of(loop.submit(ids, params, **more))  # type: ignore[arg-type]
    end = events[-1]
    assert isinstance(end, Completion)
    scores = [one for e in events if isinstance(e, Chunk) for one in e.logprobs]
    return (end.token_ids, end.text, end.finish_reason, scores), end.timings


@pytest.mark.parametrize("drafts_in_kernel", [False, True])
@pytest.mark.parametrize("top_logprobs", [None, 3])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_predictions_change_no_bit(
    share: float,
    top_logprobs: int | None,
    drafts_in_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever drafts; étude is of the models for which the kernel does."""
    model, rng = engine().model, random.Random(0)
    assert isinstance(model, KernelModel)
    assert model.drafts_in_kernel
    monkeypatch.setattr(model, "drafts_in_kernel", drafts_in_kernel)
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    for i, text in enumerate(PROMPTS):
        ids, params = engine().tokenizer.encode(text), PARAMS[i % 4]
        wanted, _ = answer(loop, ids, params, top_logprobs=top_logprobs)
        predicted = [rng.randrange(8192) if rng.random() < share else x for x in wanted[0]]
        found, t = answer(loop, ids, params, top_logprobs=top_logprobs, prediction_ids=predicted)
        assert found == wanted
        if share == 0.0:
            assert (t.tokens_per_round or 0) > 4
    assert loop.close()


def test_lookup_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is asked for again: then it is one of the earlier answers."""
    model = engine().model
    monkeypatch.setattr(model, "drafting", None)
    loop = EngineLoop(model, engine().tokenizer, engine().config.vocab_size)
    asked = [(engine().tokenizer.encode(x), PARAMS[i % 4]) for i, x in enumerate(PROMPTS)]
    wanted = [answer(loop, *one)[0] for one in asked]
    assert loop.close()
    monkeypatch.setattr(model, "drafting", replace(PREDICTIONS, looks_up=True))
    loop = EngineLoop(model, engine().tokenizer, engine().config.vocab_size)
    assert [answer(loop, *one)[0] for one in asked] == wanted
    again = [answer(loop, *one) for one in asked]
    assert [found for found, _ in again] == wanted
    assert max(t.tokens_per_round or 0 for _, t in again) > 3
    assert loop.close()


@pytest.mark.parametrize("top_logprobs", [None, 2])
def test_predictions_of_requests_side_by_side_change_no_bit(top_logprobs: int | None) -> None:
    loop = EngineLoop(engine().model, engine().tokenizer, engine().config.vocab_size)
    asked = [(engine().tokenizer.encode(x), PARAMS[i % 4]) for i, x in enumerate(PROMPTS)]
    wanted = [answer(loop, *one, top_logprobs=top_logprobs)[0] for one in asked]
    tickets = [
        loop.submit(*one, top_logprobs=top_logprobs, prediction_ids=list(before[0]))
        for one, before in zip(asked, wanted, strict=True)
    ]
    accepted = 0
    for ticket, before in zip(tickets, wanted, strict=True):
        events = events_of(ticket)
        end = events[-1]
        assert isinstance(end, Completion)
        scores = [one for e in events if isinstance(e, Chunk) for one in e.logprobs]
        assert (end.token_ids, scores) == (before[0], before[3])
        accepted += end.timings.drafts.predicted_accepted
    assert accepted > 0
    assert loop.close()
