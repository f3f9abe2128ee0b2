"""Whatever a request holds: an answer or an error that says what to change, never a 5xx."""

import json
import socket
import string

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.running import (
    CONFIG,
    Scripted,
    etude,
    is_idle,
    running,
    scripted,
    wait_for,
    wait_until_ready,
    with_tools,
)
from server.test_openai import MESSAGES
from soloist.server.fields import ChatRequest, CompletionRequest
from soloist.server.preparation.messages import MessagesRequest
from soloist.server.preparation.responses import ResponsesRequest

CHAT = {"model": "gpt", "messages": MESSAGES}
TEXT = {"model": "gpt", "prompt": "def f"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

REFUSED = [
    # path, body, status, param, words of the message
    ("chat/completions", {**CHAT, "colour": 3}, 400, "colour", "colour is not supported"),
    ("chat/completions", {**CHAT, "tools": [{"type": "x"}]}, 400, "tools[0].type", "'function'"),
    ("chat/completions", {**CHAT, "tools": [{"a": 1}]}, 400, "tools[0]", "expected"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "none to call"),
    ("chat/completions", {**CHAT, "tool_choice": "some"}, 400, "tool_choice", "'none'"),
    ("chat/completions", {**CHAT, "tool_choice": {"a": 1}}, 400, "tool_choice", "'none'"),
    ("chat/completions", {**CHAT, "temperature": 3e9}, 400, "temperature", "0.01 … 100"),
    ("chat/completions", {**CHAT, "temperature": "1"}, 400, "temperature", "valid"),
    ("chat/completions", {**CHAT, "temperature": 0, "top_p": 7}, 400, "top_p", "at most 1"),
    ("chat/completions", {**CHAT, "stop": [1]}, 400, "stop", "valid string"),
    ("chat/completions", {**CHAT, "stop": ""}, 400, "stop", "at least one character"),
    ("chat/completions", {**CHAT, "stop": [""]}, 400, "stop", "at least one character"),
    ("chat/completions", {**CHAT, "stop_token_ids": [-1]}, 400, "stop_token_ids", "at least 0"),
    ("chat/completions", {**CHAT, "stop": ["x"] * 65}, 400, "stop", "at most 64)"),
    ("chat/completions", {**CHAT, "stop": 1}, 400, "stop", "valid string, or: Input"),
    ("chat/completions", {**CHAT, "n": 0}, 400, "n", "greater than or equal to 1"),
    ("chat/completions", {**CHAT, "logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
    ("chat/completions", {**CHAT, "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", "token ids"),
    ("chat/completions", {**CHAT, "logit_bias": {"٣": 1}}, 400, "logit_bias", "token ids"),
    ("chat/completions", {**CHAT, "logit_bias": {"999999": 1}}, 400, "logit_bias", "outside"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
    ("chat/completions", {**CHAT, "top_logprobs": 21}, 400, "top_logprobs", "equal to 20"),
    (
        "chat/completions",
        {**CHAT, "stream_options": {"include_usage": True}},
        400, "stream_options", "stream: true",
    ),
    (
        "chat/completions",
        {**CHAT, "stream": True, "stream_options": {"speed": 1}},
        400, "stream_options.speed", "not supported",
    ),
    ("chat/completions", {"model": "gpt"}, 400, "messages", "required"),
    ("chat/completions", {"model": "gpt", "input": "x"}, 400, "input", "not supported"),
    ("chat/completions", {**CHAT, "messages": []}, 400, None, "empty"),
    ("chat/completions", {**CHAT, "messages": [{"content": "x"}]}, 400, None, "no role"),
    (
        "chat/completions",
        {**CHAT, "messages": [*MESSAGES, {"role": "critic", "name": "f", "content": "x"}]},
        400, f"messages[{len(MESSAGES)}].role", "'system', 'user', 'assistant', 'tool'",
    ),
    (
        "chat/completions",
        {**CHAT, "messages": [{**MESSAGES[0], "function_call": {"name": "f"}}]},
        400, "messages[0].function_call", "not supported",
    ),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400, "messages[0].content[0].type", "'text'",
    ),
    (
        "chat/completions",
        {**CHAT, "max_tokens": 5, "max_completion_tokens": 6},
        400, "max_tokens", "contradicts",
    ),
    ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ("chat/completions", {**CHAT, "max_tokens": 4000}, 400, "messages", "context holds 2,048"),
    ("chat/completions", {**CHAT, "model": "gpt-9"}, 404, "model", "available: etude-draft, gpt"),
    (
        "chat/completions",
        {**CHAT, "chat_template_kwargs": {"messages": []}},
        400, "chat_template_kwargs.messages", "in the request itself",
    ),
    (
        "chat/completions",
        {**CHAT, "reasoning_effort": "low"},
        400, "reasoning_effort", "leave it out; this model does not reason",
    ),
    ("completions", {**TEXT, "prompt": []}, 400, "prompt", "at least one prompt"),
    ("completions", {**TEXT, "prompt": ""}, 400, "prompt", "prompt"),
    ("completions", {**TEXT, "prompt": [[1], ["a"]]}, 400, "prompt", "valid"),
    ("completions", {**TEXT, "prompt": [5, 99_999_999]}, 400, "prompt", "outside"),
    ("completions", {**TEXT, "prompt": [5], "suffix": "x"}, 400, "suffix", "prompt of text"),
    ("completions", {**TEXT, "best_of": 4}, 400, "best_of", "allowed: 1"),
    ("completions", {**TEXT, "best_of": 1, "n": 2}, 400, "best_of", "allowed: 2"),
    ("completions", {**TEXT, "length_penalty": 2}, 400, "length_penalty", "allowed: 1)"),
    ("completions", {**TEXT, "priority": False}, 400, "priority", "allowed: 0)"),
    ("completions", {**TEXT, "use_beam_search": 0}, 400, "use_beam_search", "allowed: false)"),
    ("chat/completions", {**CHAT, "bad_words": ["a" * 300]}, 400, "bad_words", "allowed: [])"),
    ("chat/completions", {**CHAT, "prompt_logprobs": 0}, 400, "prompt_logprobs", "leave it out"),
    (
        "completions",
        {**TEXT, "echo": True, "logprobs": 1, "suffix": "x"},
        400, "suffix beside echo and logprobs", "without one",
    ),
    ("completions", {**TEXT, "echo": True, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (
        "completions",
        {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 0, "min_tokens": 5},
        400, "min_tokens", "at most max_tokens",
    ),
    ("completions", {**TEXT, "prompt": ["a"] * 33, "n": 2}, 400, "n", "at most 64"),
    ("completions", {**TEXT, "min_tokens": 20}, 400, "min_tokens", "at most max_tokens"),
    ("completions", {**TEXT, "seed": -1}, 400, "seed", "2^64"),
    ("completions", {**TEXT, "seed": 2**64}, 400, "seed", "(given: 1.8446744073709552e+19)"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: f"{c[0]}-{c[3]}-{c[4][:12]}")
def test_refusals_name_the_field(http, case) -> None:
    path, body, status, param, words = case
    reply = http.post(f"/v1/{path}", json=body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"n": None, "stop": None, "logprobs": False, "logit_bias": None, "stream": False},
        {"stop": "a stop string may be long " * 9},
        {"parallel_tool_calls": False, "modalities": ["text"], "functions": None},
        {"length_penalty": 1.0, "typical_p": 1, "use_beam_search": False, "priority": 0},
        {"skip_special_tokens": True, "bad_words": [], "best_of": 1, "include_reasoning": True},
        {"reasoning_effort": "none"},
        {"prompt_logprobs": None, "allowed_token_ids": None, "repeat_penalty": 1.0, "echo": False},
        {"messages": [{**m, "refusal": None, "annotations": [], "audio": None} for m in MESSAGES]},
    ],
)
def test_fields_that_change_nothing_are_taken(http, fields) -> None:
    body = {**CHAT, "max_tokens": 4, "temperature": 0}
    plain = http.post("/v1/chat/completions", json=body).json()
    reply = http.post("/v1/chat/completions", json=body | fields)
    assert reply.status_code == 200
    assert reply.json()["choices"] == plain["choices"]


def test_a_long_prompt_is_refused_with_both_numbers(client) -> None:
    text = "x = 1\n" * 3000
    num_tokens = len(etude().tokenizer.encode(text))
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="gpt", prompt=text, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert f"{num_tokens:,} tokens" in caught.value.message
    assert "This model's maximum context length is 2048 tokens" in caught.value.message
    message = {"role": "user", "content": text}
    with pytest.raises(openai.BadRequestError, match="2,048"):
        client.chat.completions.create(model="gpt", messages=[message])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[1]", "not an object"),
        (b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", ""),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', ""),
    ],
)
def test_bodies_that_are_no_requests(http, body, words) -> None:
    reply = http.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_compressed_bodies_are_refused(http) -> None:
    reply = http.post("/v1/completions", content=b"x", headers={"Content-Encoding": "zstd"})
    assert reply.status_code == 415
    assert "zstd" in reply.json()["error"]["message"]


def test_deeply_nested_values_are_refused(http) -> None:
    nested: object = 1
    for _ in range(400):
        nested = {"a": nested}
    message = {"role": "user", "content": "x", "tool_calls": [nested]}
    body = {**CHAT, "max_tokens": 1, "messages": [message]}
    assert http.post("/v1/chat/completions", content=json.dumps(body)).status_code in (200, 400)


def test_unknown_paths_and_methods(http) -> None:
    missing = http.get("/v1/embeddings")
    assert missing.status_code == 404
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    assert http.get("/v1/chat/completions").status_code == 405
    for path in ("/v1/responses/input_tokens", "/v1/messages/batches"):
        unserved = http.post(path, json={})
        assert unserved.status_code == 404
        assert "/v1/messages/count_tokens" in unserved.json()["error"]["message"]


def test_a_byte_order_mark_before_a_body_passes(http) -> None:
    body = json.dumps({**TEXT, "max_tokens": 1}).encode()
    assert http.post("/v1/completions", content=b"\xef\xbb\xbf" + body).status_code == 200


def test_every_reply_has_an_id_of_its_request(http, client, server) -> None:
    given = http.get("/health", headers={"X-Request-Id": "mine-1"}).headers
    assert given["x-request-id"] == "mine-1"
    made = {http.get("/nothing", headers=h).headers["x-request-id"] for h in ({}, {})}
    for bad in ("a" * 129, "a b", ""):
        made.add(http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"])
    assert len(made) == 5, "new ones"
    assert all(one.startswith("req_") for one in made)
    assert client.completions.create(**TEXT, max_tokens=1)._request_id.startswith("req_")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"no request\r\n\r\n")
        assert b"x-request-id: req_" in raw.recv(4096), "also one that no application sees"


def test_bodies_are_limited() -> None:
    with running(lambda _: scripted(Scripted()), most_body_bytes=2048) as server:
        wait_until_ready(server)
        import httpx2

        with httpx2.Client(base_url=server.url) as http:
            large = {**TEXT, "prompt": "x" * 4000}
            assert http.post("/v1/completions", json=large).status_code == 413

            def parts():
                for _ in range(50):
                    yield b" " * 100

            assert http.post("/v1/completions", content=parts()).status_code == 413
            assert http.post("/v1/completions", json={**TEXT, "max_tokens": 1}).status_code == 200


# Fuzzing ------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats(allow_nan=False)
    | st.text(string.printable, max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
_ROLES = st.sampled_from(["user", "assistant", "system", "tool", 1])
_KINDS = st.sampled_from(
    ["text", "input_text", "output_text", "function", "function_call", "function_call_output",
     "tool_use", "tool_result", "thinking", "reasoning", "message", "image"]
)  # fmt: skip
_CONTENT = (
    st.sampled_from(["", "x", None, 5])
    | st.lists(
        st.fixed_dictionaries(
            {"type": _KINDS},
            optional={
                "text": _JSON, "thinking": _JSON, "id": _JSON, "name": _JSON, "input": _JSON,
                "tool_use_id": st.text(max_size=2), "content": _JSON,
            },
        ),
        max_size=3,
    )
    | _JSON
)  # fmt: skip
_LIKELY = {
    "temperature": st.sampled_from([0, 0.7, 1, 2, None]),
    "top_p": st.sampled_from([0.5, 1, None]),
    "top_k": st.sampled_from([-1, 0, 5, None]),
    "n": st.sampled_from([1, 2, None]),
    "max_tokens": st.sampled_from([1, 5, 30, None]),
    "max_completion_tokens": st.sampled_from([1, 5, None]),
    "stream": st.booleans(),
    "stream_options": st.sampled_from([None, {"include_usage": True}]),
    "stop": st.sampled_from([None, "x", ["return", "\n"]]),
    "seed": st.integers(0, 2**64 - 1),
    "logit_bias": st.sampled_from([None, {"5": 3}, {"11": -100}]),
    "return_token_ids": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.sampled_from([None, True, 0, 2]),
    "suffix": st.sampled_from([None, "x"]),
    "ignore_eos": st.booleans(),
    "min_tokens": st.sampled_from([None, 0, 2]),
    "model": st.sampled_from(["gpt", None]),
    "prompt": st.sampled_from(["", "def", ["a", "b"], [1, 2], [[1], [2, 3]]]),
    "messages": st.sampled_from([MESSAGES[1:], MESSAGES])
    | st.lists(st.fixed_dictionaries({"role": _ROLES, "content": _CONTENT}), max_size=4),
    "input": st.just("x")
    | st.lists(
        st.fixed_dictionaries({"role": _ROLES, "content": _CONTENT})
        | st.fixed_dictionaries({"type": _KINDS, "call_id": _CONTENT, "output": _CONTENT})
        | st.fixed_dictionaries({"type": _KINDS, "name": _CONTENT, "arguments": _CONTENT}),
        max_size=4,
    ),
    "system": _CONTENT,
    "tools": st.lists(
        st.fixed_dictionaries(
            {"type": _KINDS}, optional={"name": _CONTENT, "function": _JSON, "input_schema": _JSON}
        ),
        max_size=2,
    ),
}


_SCHEMA = st.sampled_from([{"enum": ["a", 1]}, {"type": "integer"}, {"not": 1}, {}, 7])
_TYPES = st.sampled_from(["text", "json_object", "json_schema", "x"])
_FORM = st.fixed_dictionaries({"type": _TYPES}, optional={"schema": _SCHEMA, "name": st.just("n")})
_LIKELY |= {
    "response_format": st.fixed_dictionaries(
        {"type": _TYPES},
        optional={"json_schema": st.fixed_dictionaries({"schema": _SCHEMA}), "schema": _JSON},
    ),
    "structured_outputs": st.fixed_dictionaries(
        {}, optional={"regex": st.just("a[bc]"), "choice": st.just(["x", "yz"]), "json": _SCHEMA}
    ),
    "guided_regex": st.sampled_from(["a+", "(", ""]),
    "guided_choice": st.sampled_from([["a"], [], ["", "b"]]),
    "guided_grammar": st.sampled_from(['start: "a"', "a"]),
    "text": st.fixed_dictionaries({}, optional={"format": _FORM, "verbosity": _JSON}),
    "output_config": st.fixed_dictionaries({}, optional={"format": _FORM}),
    "tool_choice": st.sampled_from(
        ["none", "auto", "required", {"type": "any"}, {"type": "tool", "name": "f"},
         {"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}]
    ),
    "parallel_tool_calls": st.booleans(),
}  # fmt: skip
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")


@st.composite
def requests(draw) -> tuple[str, dict[str, object]]:
    path, schema = draw(
        st.sampled_from(
            [
                ("chat/completions", ChatRequest), ("completions", CompletionRequest),
                ("responses", ResponsesRequest), ("messages", MessagesRequest),
            ]
        )
    )  # fmt: skip
    names = sorted(schema.model_fields)
    needed = [name for name in names if schema.model_fields[name].is_required()]
    body = {name: draw(_LIKELY[name]) for name in needed}
    for name in draw(st.lists(st.sampled_from(names), max_size=6, unique=True)):
        body[name] = draw(_LIKELY.get(name, _JSON) | _JSON if draw(st.booleans()) else _JSON)
        if name in _LIKELY and draw(st.booleans()):
            body[name] = draw(_LIKELY[name])
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(string.ascii_lowercase, min_size=1, max_size=8))] = draw(_JSON)
    return path, body


@pytest.fixture(scope="module")
def quick():
    executor = Scripted()
    with running(lambda _: with_tools(executor), CONFIG) as server:
        wait_until_ready(server)
        yield server, executor


def test_generated_requests_get_answers_or_clear_refusals(quick) -> None:
    import httpx2

    server, executor = quick
    statuses: set[int] = set()
    with httpx2.Client(base_url=server.url, timeout=20) as http:

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(requests())
        def check(request: tuple[str, dict[str, object]]) -> None:
            path, body = request
            content = json.dumps(body)
            reply = http.post(f"/v1/{path}", content=content)
            statuses.add(reply.status_code)
            assert reply.status_code in (200, 400, 404), (reply.text, content)
            if reply.status_code != 200:
                assert reply.json()["error"]["message"]
            elif body.get("stream") and "completions" in path:
                assert reply.text.endswith("data: [DONE]\n\n")
            elif body.get("stream"):
                last = reply.text.rstrip().rpartition("\n\n")[2].splitlines()[0]
                assert last.removeprefix("event: ") in _LAST_EVENTS

        check()
    assert {200, 400} <= statuses
    wait_for(lambda: is_idle(server))
    assert executor.num_open == 0
