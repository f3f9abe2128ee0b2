"""Every reply and every event, read strictly as the official clients' types."""

import json
from collections.abc import Iterator
from functools import cache

import httpx2
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.running import Scripted, running, wait_until_ready, with_tools
from server.test_tools import CLAUDE_TOOLS, ITEM_TOOLS, TEXT, TOOLS

CHAT = {"messages": [{"role": "user", "content": "Weather?"}]}
BOTH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with running(lambda _: with_tools(Scripted(TEXT, 2000, ends=True))) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as client:
            yield client


def events(reply: httpx2.Response) -> list[dict]:
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


adapter = cache(TypeAdapter)  # building one takes seconds


def check(kind: object, value: object) -> None:
    adapter(kind).validate_json(json.dumps(value), strict=True)


@pytest.mark.parametrize(
    ("path", "body", "whole", "part"),
    [
        ("chat/completions", CHAT | {"tools": TOOLS}, ChatCompletion, ChatCompletionChunk),
        ("chat/completions", CHAT | {"n": 2, "return_token_ids": True}, ChatCompletion,
         ChatCompletionChunk),
        ("completions", {"prompt": "x", "max_tokens": 9}, Completion, Completion),
        ("completions", {"prompt": ["x", "y"], "max_tokens": 9, "echo": True}, Completion,
         Completion),
        ("responses", {"input": "x", "model": "gpt", "tools": ITEM_TOOLS}, Response,
         ResponseStreamEvent),
        ("responses", {"input": "x", "model": "gpt", "max_output_tokens": 2}, Response,
         ResponseStreamEvent),
        ("messages", CHAT | {"max_tokens": 500, "tools": CLAUDE_TOOLS}, Message,
         RawMessageStreamEvent),
        ("messages", CHAT | {"max_tokens": 1}, Message, RawMessageStreamEvent),
    ],
)  # fmt: skip
def test_answers(http, path, body, whole, part) -> None:
    reply = http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    check(whole, reply.json())
    options = {"stream_options": BOTH} if "completions" in path else {}
    streamed = events(http.post(f"/v1/{path}", json=body | {"stream": True} | options))
    assert len(streamed) > 2
    for event in streamed:
        if part is Completion:
            # The type has no null, which OpenAI's own streams send until the end.
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(part, event)


def test_what_is_not_an_answer(http) -> None:
    for model in http.get("/v1/models").json()["data"]:
        check(Model, model)
    check(MessageTokensCount, http.post("/v1/messages/count_tokens", json=CHAT).json())
    for body in (CHAT, CHAT | {"max_tokens": 0}, CHAT | {"max_tokens": 1, "model": "no"}):
        reply = http.post("/v1/messages", json=body)
        assert reply.status_code in (400, 404)
        check(ErrorResponse, reply.json())
