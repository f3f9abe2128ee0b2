"""Responses through the official client, streamed and whole."""

import openai
import pytest
from openai.types.responses import Response

from server.running import is_idle, wait_for
from server.test_openai import chat_answer

PLAIN = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "A function that adds two numbers"},
]
ASK = {
    "model": "gpt", "instructions": PLAIN[0]["content"], "input": PLAIN[1]["content"],
    "temperature": 0,
}  # fmt: skip


def test_a_response_is_the_engines(client) -> None:
    wanted = chat_answer(PLAIN, max_tokens=20)
    reply = client.responses.create(**ASK, max_output_tokens=20, metadata={"a": "b"})
    assert isinstance(reply, Response)
    assert Response.model_validate(reply.model_dump()) is not None, "every required field is there"
    assert reply.output_text == wanted.text
    assert reply.status == ("incomplete" if wanted.finish_reason == "length" else "completed")
    assert reply.metadata == {"a": "b"}
    assert reply.usage.input_tokens == wanted.timings.prompt_tokens
    assert reply.usage.output_tokens == len(wanted.token_ids)


def test_a_stream_is_the_same_response(client) -> None:
    stop = chat_answer(PLAIN, max_tokens=30).text[12:15]
    ask = {**ASK, "max_output_tokens": 30, "extra_body": {"stop": stop}}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert whole.status == "completed"
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]


def test_a_stream_that_is_cut_is_incomplete(client) -> None:
    ask = {**ASK, "max_output_tokens": 5, "extra_body": {"ignore_eos": True}}
    last = list(client.responses.create(**ask, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == client.responses.create(**ask).output_text


def test_log_probabilities_are_those_of_the_chat(client) -> None:
    stop = chat_answer(PLAIN, max_tokens=30).text[12:15]
    chat = {"messages": PLAIN, "max_tokens": 30, "logprobs": True, "top_logprobs": 2, "stop": stop}
    whole = client.chat.completions.create(model="gpt", temperature=0, **chat)
    wanted = [entry.model_dump() for entry in whole.choices[0].logprobs.content]
    ask = {
        **ASK, "max_output_tokens": 30, "extra_body": {"stop": stop}, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    (told,) = client.responses.create(**ask).output[0].content
    assert [entry.model_dump() for entry in told.logprobs] == wanted
    assert len(wanted) > 1
    *events, last = client.responses.create(**ask, stream=True)
    assert last.response.output[0].content[0].logprobs == told.logprobs
    pieces = [x for e in events if e.type == "response.output_text.delta" for x in e.logprobs]
    assert pieces
    assert [x.token for x in pieces] == [x.token for x in told.logprobs][: len(pieces)]
    (done,) = [e for e in events if e.type == "response.output_text.done"]
    assert [x.logprob for x in done.logprobs] == [x.logprob for x in told.logprobs]


def test_items_and_parts(client) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Write Python."}]},
        {"type": "message", "role": "user", "content": "a"},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "b"}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": x} for x in ("c", "d")]},
    ]  # fmt: skip
    chat = [
        PLAIN[0], {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]  # fmt: skip
    reply = client.responses.create(model="gpt", input=items, temperature=0, max_output_tokens=8)
    assert reply.output_text == chat_answer(chat, max_tokens=8).text


def test_messages_of_the_system_side_by_side_are_one(client) -> None:
    items = [
        {"role": "developer", "content": "a", "id": "msg_1"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    chat = [{"role": "system", "content": "Write Python.\na\nb"}, {"role": "user", "content": "c"}]
    ask = {"model": "gpt", "instructions": "Write Python.", "input": items, "temperature": 0}
    more = {
        "include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"},
        "truncation": "auto", "max_tool_calls": 3,
        "reasoning": {"summary": "auto", "effort": None},
    }  # fmt: skip
    reply = client.responses.create(
        **ask, **more, max_output_tokens=8, extra_body={"client_metadata": {"a": "b"}}
    )
    assert reply.output_text == chat_answer(chat, max_tokens=8).text


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
         "input[0].encrypted_content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "middle"}, "truncation"),
        ({"extra_body": {"typical_p": 0.9}}, "typical_p"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "little"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 5000}, "input"),
        ({"extra_body": {"stream_options": {"include_obfuscation": True}}}, "stream_options"),
        ({"extra_body": {"colour": 1}}, "colour"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client, changed, param) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK | changed)
    assert caught.value.param == param


@pytest.mark.parametrize("does_delete", [False, True])
def test_cancelling_ends_a_stream_with_an_error(client, server, does_delete) -> None:
    more = {"extra_body": {"ignore_eos": True}, "stream": True}
    stream = client.responses.create(**ASK, **more)
    first = next(iter(stream))
    if does_delete:
        client.responses.delete(first.response.id)
    else:
        client.post(f"/responses/{first.response.id}/cancel", cast_to=object)
    last = list(stream)[-1]
    assert last.type == "error"
    assert "cancelled through the API" in last.message
    wait_for(lambda: is_idle(server))
