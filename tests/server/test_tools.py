"""Tool calls and reasoning through the official clients, from a model that says what it must."""

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest
from openai.types.responses import Response

from server.running import Scripted, running, wait_until_ready, with_tools
from soloist.server.serve import Server

ARGUMENTS = {"city": 'Zürich "}', "days": [1, 2]}
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + json.dumps(ARGUMENTS) + "}\n</tool_call>"
TEXT = "<think>\nThey want it.\n</think>\n\nLet me see.\n" + CALL + "\n"
TEXT += CALL.replace("weather", "t")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "t", "description": "time"}},
]
ASK = {"model": "gpt", "messages": [{"role": "user", "content": "Weather?"}], "temperature": 0}


def client_of(text: str) -> Iterator[tuple[openai.OpenAI, Server]]:
    with running(lambda _: with_tools(Scripted(text, 400, ends=True))) as server:
        wait_until_ready(server)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            yield client, server


@pytest.fixture(scope="module")
def calling():
    yield from client_of(TEXT)


@pytest.fixture
def client(calling) -> openai.OpenAI:
    return calling[0]


def test_calls_and_reasoning(client) -> None:
    choice = client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
    message = choice.message
    assert message.content == "Let me see."
    assert message.reasoning == message.reasoning_content == "They want it."
    assert [c.function.name for c in message.tool_calls] == ["weather", "t"]
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [ARGUMENTS] * 2
    assert len({c.id for c in message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


def test_streamed_calls_are_the_same(client) -> None:
    with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [c.function.name for c in choice.message.tool_calls] == ["weather", "t"]
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [ARGUMENTS] * 2
    chunks = [e.chunk for e in events if e.type == "chunk"]
    thoughts = [getattr(c.choices[0].delta, "reasoning", None) or "" for c in chunks]
    assert "".join(thoughts) == "They want it."
    pieces = [c for c in chunks if c.choices[0].delta.tool_calls]
    assert len(pieces) > 4, "arguments come as they are written"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(c.choices[0].delta.role for c in chunks[1:])


def test_without_tools_a_call_is_text(client) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(**ASK, **more).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content == TEXT.partition("</think>\n\n")[2]
        assert choice.finish_reason == "stop"


def test_an_answer_that_begins_within_reasoning(client) -> None:
    body = {"chat_template_kwargs": {"think": True}}
    message = client.chat.completions.create(**ASK, extra_body=body).choices[0].message
    assert message.reasoning == "<think>\nThey want it."


MAGISTRAL = (
    "{# [TOOL_CALLS] [ARGS] [THINK] [/THINK] #}{% for m in messages %}{{ m.content }}\n{% endfor %}"
)


@pytest.mark.parametrize("forced", [False, True])
def test_mistrals_reasoning_and_calls(forced) -> None:
    text = "[THINK]They want it.[/THINK]" + '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}'

    def load(_):
        return with_tools(Scripted(text, 400, ends=True), template=MAGISTRAL)

    more = {"tool_choice": "required"} if forced else {}
    with running(load) as server:
        wait_until_ready(server)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            message = client.chat.completions.create(**ASK, tools=TOOLS, **more).choices[0].message
            stream = client.chat.completions.create(**ASK, stream=True)
            deltas = [c.choices[0].delta for c in stream if c.choices]
    assert message.reasoning == message.reasoning_content == "They want it."
    assert [c.function.name for c in message.tool_calls] == ["weather"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"}
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "They want it."


def test_tools_and_earlier_calls_reach_the_template(calling) -> None:
    client, server = calling
    function = {"name": "t", "arguments": '{"a": 1}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    reply = client.chat.completions.create(
        model="gpt", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
    )
    text = server.host.ready().engine.tokenizer.decode(reply.prompt_token_ids)
    assert '"description": "time"' in text
    assert '"id": "call_1"' in text
    assert '"arguments": {"a": 1}' in text, "an object, not a text"
    assert "tool: rain" in text


def test_what_is_no_call_is_content_with_a_warning() -> None:
    for client, _ in client_of("So <tool_call>weather()</tool_call>"):
        choice = client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
        assert choice.message.content == "So <tool_call>weather()</tool_call>"
        assert "given as text" in choice.warning
        assert choice.finish_reason == "stop"
        chunks = list(client.chat.completions.create(**ASK, tools=TOOLS, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert text == choice.message.content
        assert "given as text" in chunks[-1].choices[0].warning


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 5}}]},
         "tools[0].function.strict"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(client, more, param) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, **more)
    assert caught.value.param == param


# Anthropic's client -------------------------------------------------------------------------------

CLAUDE_TOOLS = [
    {"name": "weather", "input_schema": PARAMETERS},
    {"name": "t", "description": "time", "input_schema": {"type": "object"}},
]
CLAUDE_ASK = {"model": "gpt", "max_tokens": 500, "messages": ASK["messages"]}


@pytest.fixture
def claude(calling) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=calling[1].url, api_key="x", max_retries=0) as made:
        yield made


def test_blocks_of_thinking_text_and_tools(claude) -> None:
    reply = claude.messages.create(**CLAUDE_ASK, tools=CLAUDE_TOOLS)
    assert [b.type for b in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *uses = reply.content
    assert thinking.thinking == "They want it."
    assert text.text == "Let me see."
    assert [(u.name, u.input) for u in uses] == [("weather", ARGUMENTS), ("t", ARGUMENTS)]
    assert reply.stop_reason == "tool_use"
    with claude.messages.stream(**CLAUDE_ASK, tools=CLAUDE_TOOLS) as stream:
        deltas = [e for e in stream if e.type == "content_block_delta"]
        final = stream.get_final_message()
    assert len(deltas) > 4
    assert final.stop_reason == "tool_use"
    without_ids = [b.model_dump(exclude={"id"}) for b in final.content]
    assert without_ids == [b.model_dump(exclude={"id"}) for b in reply.content]


def test_thoughts_may_be_omitted(claude) -> None:
    ask = {**CLAUDE_ASK, "tools": CLAUDE_TOOLS}
    ask["thinking"] = {"type": "adaptive", "display": "omitted"}
    reply = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        told = [e.delta.type for e in stream if e.type == "content_block_delta"]
        final = stream.get_final_message()
    assert "thinking_delta" not in told
    for one in (reply, final):
        assert [b.type for b in one.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert one.content[0].thinking == ""
        assert one.content[1].text == "Let me see."
    again = [*ask["messages"], {"role": "assistant", "content": reply.content[:2]}]
    claude.messages.create(**{**ask, "messages": [*again, {"role": "user", "content": "And?"}]})


def test_a_conversation_with_tools_is_the_one_that_templates_know(calling, claude) -> None:
    engine = calling[1].host.ready().engine
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "t", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1",
                 "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such town",
                 "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]  # fmt: skip
    function = {"name": "t", "arguments": {"a": 1}}
    plain = [
        messages[0],
        {
            "role": "assistant", "content": "Let me see.", "reasoning_content": "hm",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "The call failed:\nno such town"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    tool = {"name": "t", "description": "time", "parameters": {"type": "object"}}
    text = engine.chat_template.render(plain, tools=[{"type": "function", "function": tool}])
    counted = claude.messages.count_tokens(
        model="gpt", messages=messages, tools=CLAUDE_TOOLS[1:]
    ).input_tokens
    assert counted == len(engine.tokenizer.encode(text, add_special_tokens=False))


def test_a_tool_that_is_loaded_later_is_told_of_in_a_result(calling, claude) -> None:
    """The beginning of the prompt stays the one that was cached."""
    engine = calling[1].host.ready().engine
    search = {"name": "search", "input_schema": {"type": "object"}}
    tools = [search, *({**tool, "defer_loading": True} for tool in CLAUDE_TOOLS)]
    use = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    found = [{"type": "text", "text": "Found:"}, {"type": "tool_reference", "tool_name": "t"}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    function = '{"name":"t","description":"time","parameters":{"type":"object"}}'
    told = f"Found:\n<function>{function}</function>"
    call = {"id": "toolu_1", "type": "function", "function": {"name": "search", "arguments": {}}}
    plain = [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": told},
    ]
    first = {"name": "search", "description": "", "parameters": {"type": "object"}}
    text = engine.chat_template.render(plain, tools=[{"type": "function", "function": first}])
    counted = claude.messages.count_tokens(model="gpt", messages=messages, tools=tools)
    assert counted.input_tokens == len(engine.tokenizer.encode(text, add_special_tokens=False))

    ask = {"model": "gpt", "max_tokens": 500, "messages": messages, "tools": tools}
    forced = claude.messages.create(**ask, tool_choice={"type": "tool", "name": "t"})
    assert [b.name for b in forced.content if b.type == "tool_use"][:1] == ["t"]
    claude.messages.create(**ask, tool_choice={"type": "none"})
    with pytest.raises(anthropic.BadRequestError, match="weather"):  # nobody referred to it
        claude.messages.create(**ask, tool_choice={"type": "tool", "name": "weather"})
    with pytest.raises(anthropic.BadRequestError, match=r"tool_name.*none of the name 't'"):
        claude.messages.create(**{**ask, "tools": tools[:2]})
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.defer_loading"):
        claude.messages.create(**{**ask, "tools": [{**search, "defer_loading": "yes"}, *tools]})


def test_thinking_that_cannot_be_switched_off_is_said_so(claude) -> None:
    with pytest.raises(anthropic.BadRequestError, match="always reasons"):
        claude.messages.create(**CLAUDE_ASK, thinking={"type": "disabled"})
    reply = claude.messages.create(**CLAUDE_ASK, thinking={"type": "adaptive"})
    assert reply.content[0].type == "thinking"


# Responses ----------------------------------------------------------------------------------------

ITEM_TOOLS = [
    {"type": "function", "name": "weather", "parameters": PARAMETERS},
    {"type": "function", "name": "t", "description": "time"},
]


def test_items_of_reasoning_text_and_calls(client) -> None:
    ask = {"model": "gpt", "input": "Weather?", "tools": ITEM_TOOLS}
    reply = client.responses.create(**ask)
    assert Response.model_validate(reply.model_dump())
    assert [item.type for item in reply.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    reasoning, _, *calls = reply.output
    assert reasoning.content[0].text == "They want it."
    assert 1 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
    assert reply.output_text == "Let me see."
    assert [c.name for c in calls] == ["weather", "t"]
    assert [json.loads(c.arguments) for c in calls] == [ARGUMENTS] * 2
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    shown = {"id", "call_id", "parsed_arguments", "parsed"}
    assert [item.model_dump(exclude=shown) for item in final.output][2:] == [
        item.model_dump(exclude=shown) for item in calls
    ]
    assert final.output_text == "Let me see."
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 2
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "They want it."
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_sealed_reasoning_comes_back_as_it_was(client) -> None:
    ask = {"model": "gpt", "input": "Weather?", "include": ["reasoning.encrypted_content"]}
    first = client.responses.create(**ask).output[0]
    with client.responses.stream(**ask) as stream:
        *_, last = stream
    assert last.response.output[0].encrypted_content == first.encrypted_content
    told = {"type": "reasoning", "id": "rs_1", "summary": []}
    user = {"role": "user", "content": "Weather?"}
    answer = {"role": "assistant", "content": "Rain."}

    def tokens_with(reasoning: dict) -> int:
        items = [user, told | reasoning, answer, {"role": "user", "content": "And?"}]
        reply = client.responses.create(model="gpt", input=items, max_output_tokens=1)
        return reply.usage.input_tokens

    plain = {"content": [{"type": "reasoning_text", "text": "They want it."}]}
    sealed = {"encrypted_content": first.encrypted_content}
    assert tokens_with(sealed) == tokens_with(plain) > tokens_with({"content": []})


def test_items_of_earlier_turns_reach_the_template(calling) -> None:
    client, server = calling
    first = client.responses.create(model="gpt", input="Weather?", tools=ITEM_TOOLS)
    call = first.output[3]
    items = [
        {"role": "user", "content": "Weather?"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    reply = client.responses.create(model="gpt", input=items, tools=ITEM_TOOLS)
    engine = server.host.ready().engine
    function = {"arguments": ARGUMENTS}
    plain = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": "Let me see.", "reasoning_content": "They want it.",
            "tool_calls": [
                {"id": c.call_id, "type": "function", "function": {"name": c.name, **function}}
                for c in first.output[2:]
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}}
             for t in ITEM_TOOLS]  # fmt: skip
    text = engine.chat_template.render(plain, tools=tools)
    assert reply.usage.input_tokens == len(engine.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "apply_patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "strict": 5}]}, "tools[0].strict"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": ITEM_TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "name": "f", "namespace": "n"}]},
         "input[0].namespace"),
    ],
)  # fmt: skip
def test_items_that_are_refused(client, more, param) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "gpt", "input": "x"} | more)
    assert caught.value.param == param


def test_log_probabilities_beside_calls_are_refused(client) -> None:
    with pytest.raises(openai.BadRequestError, match="not supported with reasoning or tools"):
        client.responses.create(
            model="gpt", input="x", include=["message.output_text.logprobs"], tools=ITEM_TOOLS
        )
