"""étude under grammars on the CPU: forced tokens at once are those that come one at a time."""

import json
import re
from functools import cache

import pytest

from soloist.engine import Chunk, Completion, Engine, EngineConfig, Request
from soloist.engine.reference import ReferenceModel
from soloist.errors import GrammarFailed
from soloist.sampling import Sampler, SamplingParams
from soloist.text.answers import answer_grammar, json_form, regex_form

PROMPT = "def settings():\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_function": {"enum": ["settings", "something else"]},
        "is_long": {"type": "boolean"},
        "line_numbers": {"type": "array", "items": {"enum": [1, 20, 300]}, "maxItems": 3},
    },
    "required": ["name_of_the_function", "is_long", "line_numbers"],
    "additionalProperties": False,
}
REQUESTS = {
    "greedy": SamplingParams(max_tokens=80),
    "sampled": SamplingParams(max_tokens=80, temperature=1.2, seed=3),
    "all": SamplingParams(
        max_tokens=80, temperature=0.9, seed=4, top_p=0.9, repetition_penalty=1.3,
        frequency_penalty=0.5, logit_bias={300: 4.0}, min_tokens=60,
    ),
    "short": SamplingParams(max_tokens=7),
}  # fmt: skip


@cache
def engine() -> Engine:
    return Engine.load(EngineConfig("etude-draft", device="cpu", context_tokens=512))


def grammar(form=None):
    return engine().grammars.compile(answer_grammar(form or json_form(SCHEMA)))


def answer(params: SamplingParams, form=None) -> Completion:
    *chunks, end = engine().generate(PROMPT, params, grammar=grammar(form))
    assert isinstance(end, Completion)
    assert "".join(c.text for c in chunks if isinstance(c, Chunk)) == end.text
    return end


def one_at_a_time(params: SamplingParams) -> list[int]:
    """The definition: every token chosen from logits, of which the mask leaves one or more."""
    ids = engine().tokenizer.encode(PROMPT)
    eos_ids, model = engine().tokenizer.eos_ids, engine().model
    sampler = Sampler(params, engine().config.vocab_size, ids, eos_ids, grammar().start())
    request = Request(ids, sampler, top_logprobs=0)
    assert model.open(request)
    made = [model.read(request).token_id]
    while not request.has_all_tokens:
        made += [picked.token_id for (picked,) in model.rounds([request], 99)]
    model.free(request)
    return made


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
def test_forced_tokens_change_no_other(params, monkeypatch) -> None:
    fed: list[int] = []
    reference = engine().model.reference
    begin = reference.begin
    monkeypatch.setattr(engine().model, "drafting", None)
    monkeypatch.setattr(
        reference,
        "begin",
        lambda ids, *rest, **named: [fed.append(len(ids)), begin(ids, *rest, **named)][1],
    )
    assert isinstance(engine().model, ReferenceModel)
    end = answer(params)
    assert len(fed) < len(end.token_ids) or params.max_tokens == 7
    if params.max_tokens > 7:
        assert max(fed[1:]) > 3, "forced tokens are fed together"
        value = json.loads(end.text)
        assert value["name_of_the_function"] in ("settings", "something else")
        assert end.finish_reason == "stop"
        assert len(end.token_ids) < 60, "what is complete is over, whatever min_tokens says"
    else:
        assert end.finish_reason == "length"
        assert len(end.token_ids) == 7
    assert one_at_a_time(params) == list(end.token_ids)


def test_a_form_that_may_go_on_ends_with_the_models_own_token() -> None:
    end = answer(SamplingParams(max_tokens=40, temperature=1.0, seed=1), regex_form("[a-z ]+"))
    assert end.finish_reason in ("eos", "length")
    assert set(end.text) <= set("abcdefghijklmnopqrstuvwxyz ")


def test_a_long_forced_text() -> None:
    text = "def forced(): return " + "1 + " * 60 + "1"
    end = answer(SamplingParams(max_tokens=300), regex_form(f"[ab]{re.escape(text)}[cd]"))
    assert end.text[1:-1] == text


def test_a_request_that_cannot_go_on_fails_and_the_next_one_runs() -> None:
    tokenizer = engine().tokenizer
    size = tokenizer.vocab_size
    stops = frozenset(i for i in range(size) if tokenizer.token_bytes(i)[:1] == b"b")
    with pytest.raises(GrammarFailed):
        answer(SamplingParams(max_tokens=9, stop_token_ids=stops), regex_form("[ac]b"))
    assert answer(REQUESTS["short"]).timings.new_tokens == 7
