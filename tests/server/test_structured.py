"""Answers that must have a form, through the official clients: whatever a model says, they do."""

import json
import re
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from server.running import Scripted, running, wait_until_ready, with_tools


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["walk", "drive"]
    is_long: bool
    steps: list[Literal["left", "right"]]


# Numbers, texts and lists may go on as long as a model likes: here everything has an end.
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["walk", "drive"]},
        "is_long": {"type": "boolean"},
        "steps": {
            "type": "array", "minItems": 1, "maxItems": 2, "items": {"enum": ["left", "right"]},
        },
    },
    "required": ["kind", "is_long", "steps"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "A plan"}]
ASK = {"model": "gpt", "messages": MESSAGES}
HOT = {"temperature": 1.3, "seed": 5}
WAYS = [{"temperature": 0}, HOT, {**HOT, "frequency_penalty": 1.0, "logit_bias": {"11": 5}}]


def text_of(chunks) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "hot", "penalties"])
def test_json_of_a_schema(client, way) -> None:
    reply = client.chat.completions.create(**ASK, **way, response_format=FORMAT)
    choice = reply.choices[0]
    plan = Plan.model_validate_json(choice.message.content)
    assert 1 <= len(plan.steps) <= 2
    assert choice.message.content == json.dumps(json.loads(choice.message.content))
    assert choice.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**ASK, **way, response_format=FORMAT, stream=True))
    assert text_of(chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_and_token_ids_are_those_of_the_same_answer(client) -> None:
    body = {"return_token_ids": True}
    plain = client.chat.completions.create(**ASK, **HOT, response_format=FORMAT, extra_body=body)
    reply = client.chat.completions.create(
        **ASK, **HOT, response_format=FORMAT, logprobs=True, top_logprobs=2, extra_body=body
    )
    assert reply.choices[0].message.content == plain.choices[0].message.content
    assert reply.choices[0].token_ids == plain.choices[0].token_ids
    assert len(reply.choices[0].logprobs.content) == len(reply.choices[0].token_ids)


def test_several_answers_each_have_the_form(client) -> None:
    reply = client.chat.completions.create(**ASK, **HOT, n=2, response_format=FORMAT)
    assert all(Plan.model_validate_json(choice.message.content) for choice in reply.choices)


def test_parse_of_the_client(client) -> None:
    class Pair(BaseModel):
        model_config = ConfigDict(extra="forbid")
        left: Literal["a", "b"]
        right: bool

    reply = client.chat.completions.parse(**ASK, response_format=Pair)
    assert isinstance(reply.choices[0].message.parsed, Pair)
    answer = client.responses.parse(model="gpt", input="A pair", text_format=Pair)
    assert isinstance(answer.output_parsed, Pair)


def test_any_object(client) -> None:
    reply = client.chat.completions.create(
        **ASK, **HOT, max_tokens=20, response_format={"type": "json_object"}
    )
    assert reply.choices[0].message.content.startswith("{")
    assert reply.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("body", "matches"),
    [
        ({"guided_regex": r"[ab]{3}/\d"}, r"[ab]{3}/\d"),
        ({"structured_outputs": {"regex": "(yes|no), [A-Z]{2}"}}, "(yes|no), [A-Z]{2}"),
        ({"guided_choice": ["Zürich", 'x "y"\n']}, 'Zürich|x "y"\n'),
        ({"structured_outputs": {"choice": ["one", "other"]}}, "one|other"),
        ({"guided_grammar": 'start: "(" (start | /[0-9]/) ")"'}, r"\(.*\)"),
        ({"structured_outputs": {"grammar": 'start: "go" ("!" | "?")'}}, r"go[!?]"),
        ({"guided_json": {"enum": ["p", 5]}}, r'"p"|5'),
        ({"guided_json": '{"const": null}'}, "null"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_patterns_choices_and_grammars(client, body, matches) -> None:
    short = {"max_tokens": 30, "extra_body": body}
    choice = client.chat.completions.create(**ASK, temperature=0, **short).choices[0]
    continued = client.completions.create(model="gpt", prompt="def f", **HOT, **short).choices[0]
    for text, reason in (
        (choice.message.content, choice.finish_reason), (continued.text, continued.finish_reason),
    ):  # fmt: skip
        if "grammar" in str(body) and reason == "length":
            continue  # brackets may be opened for ever
        assert reason == "stop"
        assert re.fullmatch(matches, text, re.DOTALL), text


def test_whole_tokens_that_are_forced_come_at_once(client) -> None:
    body = {"guided_choice": ["def the_one_answer_there_is():"], "return_token_ids": True}
    chunks = list(client.chat.completions.create(**ASK, stream=True, extra_body=body))
    assert text_of(chunks) == body["guided_choice"][0]
    reply = client.chat.completions.create(**ASK, extra_body=body)
    assert reply.usage.completion_tokens == len(reply.choices[0].token_ids) > 5


def test_limits_and_stop_strings_end_an_answer_before_it_has_its_form(client) -> None:
    cut = client.chat.completions.create(**ASK, response_format=FORMAT, max_tokens=3).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.content.startswith('{"kind')
    stopped = client.chat.completions.create(
        **ASK, response_format=FORMAT, stop='", "is', temperature=0
    ).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content in ('{"kind": "walk', '{"kind": "drive')


def test_responses(client) -> None:
    form = {"type": "json_schema", "name": "plan", "schema": SCHEMA}
    reply = client.responses.create(model="gpt", input="A plan", text={"format": form})
    assert Plan.model_validate_json(reply.output_text)
    assert reply.status == "completed"
    assert reply.text.format.name == "plan"
    with client.responses.stream(model="gpt", input="A plan", text={"format": form}) as stream:
        list(stream)
        assert Plan.model_validate_json(stream.get_final_response().output_text)


def test_messages(server) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    ask = {"model": "gpt", "max_tokens": 300, "messages": MESSAGES}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as claude:
        reply = claude.messages.create(**ask, output_config={"format": form})
        assert Plan.model_validate_json(reply.content[0].text)
        assert reply.stop_reason == "end_turn"
        with claude.messages.stream(**ask, output_config={"format": form}) as stream:
            assert Plan.model_validate_json(stream.get_final_text())
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.effort"):
            claude.messages.create(**ask, output_config={"effort": "low"})
        bad = {"type": "json_schema", "schema": {"not": {}}}
        with pytest.raises(anthropic.BadRequestError, match="Unimplemented keys"):
            claude.messages.create(**ask, output_config={"format": bad})


SCHEMA_FIELD = "response_format.json_schema.schema"


def named(schema) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": named({"type": "strin"})}, SCHEMA_FIELD, "Invalid type: strin"),
        ({"response_format": named({"type": "array", "uniqueItems": True})}, SCHEMA_FIELD,
         "uniqueItems"),
        ({"response_format": named({"$ref": "#/nope"})}, SCHEMA_FIELD, "does not exist"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format.a", "supported"),
        ({"response_format": named(5)}, SCHEMA_FIELD, "valid dictionary"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[]"}, "guided_json", "an object"),
        ({"structured_outputs": {}}, "structured_outputs", "expected json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice",
         "one form"),
        ({"guided_regex": "a", "response_format": named({})}, "guided_regex", "one form"),
        ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs.disable_fallback",
         "not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_form_is_refused_by_name(client, body, param, words) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, extra_body=body)
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_form_that_stop_tokens_make_impossible_fails_clearly(server, client) -> None:
    tokenizer = server.host.ready().engine.tokenizer
    tokens = {tokenizer.decode([i]): i for i in range(tokenizer.vocab_size)}
    stops = [tokens[x] for x in ("a", "ab", "abc") if x in tokens]
    body = {"guided_regex": "abc", "stop_token_ids": stops}
    with pytest.raises(openai.BadRequestError, match="can no longer match"):
        client.chat.completions.create(**ASK, extra_body=body)
    assert client.chat.completions.create(**ASK, max_tokens=2).choices, "others are unharmed"


# Forced calls -------------------------------------------------------------------------------------

DAYS = {"type": "integer", "minimum": 1, "maximum": 7}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Zürich", "Bern"]}, "days": DAYS},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATES = {
    "tagged": "<tool_call>",
    "bare": '"parameters": <|python_tag|>',
    "listed": "[TOOL_CALLS]",
    "named": "[TOOL_CALLS] [ARGS]",
    "values": "<tool_call> <function= <parameter=",
    "python": "[func_name1(a=b)]",
}
BODY = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture(scope="module", params=TEMPLATES)
def calling(request):
    def load(_):
        source = "{# " + TEMPLATES[request.param] + " #}" + BODY
        return with_tools(Scripted("def f(x): 17\n", ends=True), template=source)

    with running(load) as server:
        wait_until_ready(server)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
            yield made


def check_call(call) -> None:
    given = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert given == {}
    else:
        assert call.function.name == "weather"
        assert set(given) == {"city", "days"}
        assert given["city"] in ("Zürich", "Bern")
        assert 1 <= given["days"] <= 7


def test_required_calls(calling) -> None:
    ask = {**ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    for several in (False, True):
        choice = calling.chat.completions.create(**ask, parallel_tool_calls=several).choices[0]
        assert choice.message.tool_calls
        for call in choice.message.tool_calls[: len(choice.message.tool_calls) - several]:
            check_call(call)
        if not several:
            assert choice.message.content is None
            assert len(choice.message.tool_calls) == 1
            assert choice.finish_reason == "tool_calls"
    with calling.chat.completions.stream(**ask, parallel_tool_calls=False) as stream:
        list(stream)
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    check_call(call)


def test_a_named_call(calling) -> None:
    choice = calling.chat.completions.create(**ASK, tools=TOOLS, tool_choice=NAMED).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    check_call(call)
    assert choice.finish_reason == "tool_calls"


def test_strict_tools_leave_text_free(calling) -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    choice = calling.chat.completions.create(**ASK, tools=strict).choices[0]
    assert choice.message.content.strip() == "def f(x): 17"
    assert choice.finish_reason == "stop"


def test_a_tool_without_a_grammar_is_blamed(calling) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError, match=r"Unimplemented keys|not of 'a'") as caught:
        calling.chat.completions.create(**ASK, tools=tools, tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters"


# Reasoning comes first ----------------------------------------------------------------------------

THINKING = (
    BODY + "{% if think == 1 %}<think>\n{% elif think == 2 %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("think", "script"),
    [
        (1, "Hm {no}.\n</think>\n\n17"), (0, "<think>\nHm {no}.\n</think>\n\n17"), (2, "17"),
        (0, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_call", [False, True])
def test_the_form_begins_behind_reasoning(think, script, is_call) -> None:
    script = script or ("<tool_call>" if is_call else '{"')

    def load(_):
        return with_tools(Scripted(script, ends=True), template="{# <tool_call> #}" + THINKING)

    more = {"tools": TOOLS, "tool_choice": NAMED} if is_call else {"response_format": FORMAT}
    body = {"chat_template_kwargs": {"think": think}}
    with running(load) as server:
        wait_until_ready(server)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            reply = client.chat.completions.create(**ASK, **more, extra_body=body)
    choice = reply.choices[0]
    if "Hm" in script:
        assert choice.message.reasoning == "Hm {no}."
    if is_call:
        check_call(choice.message.tool_calls[0])
    else:
        Plan.model_validate_json(choice.message.content)
