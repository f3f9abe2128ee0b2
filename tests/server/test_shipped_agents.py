"""First requests of agents and chat clients, shortened, as they send them to the shipped model.

The model makes little of them. What matters is that a turn ends, with the events that each client
waits for.
"""

import json
from typing import Any

import httpx2 as httpx
import pytest
from typer.main import get_command

from soloist.cli.app import app
from soloist.model.families import read_config
from soloist.model.folder import shipped_folder

SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "timeout_ms": {"type": "number", "description": "Milliseconds"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
NAMES = ("Bash", "Edit", "Glob", "Grep", "Read", "Write", "Task", "TodoWrite", "WebFetch", "Skill")
SCHEMA = "http://json-schema.org/draft-07/schema#"
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "parameters": SHELL}}

CODEX = {
    "model": "gpt",
    "instructions": "You are a coding agent.\nRun commands, and say what you did.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "<cwd>/home/me</cwd>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "Say hello"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command", "strict": False,
         "parameters": SHELL},
        {"type": "function", "name": "update_plan", "description": "", "strict": False,
         "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    ],
    "tool_choice": "auto", "parallel_tool_calls": False, "store": False, "stream": True,
    "include": [], "prompt_cache_key": "01a20e6d-e339-7a51",
}  # fmt: skip

CLAUDE_CODE = {
    "model": "gpt", "max_tokens": 128, "stream": True,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "# Tone\nBe brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
            {"type": "text", "text": "Say hello", "cache_control": {"type": "ephemeral"}},
        ]},
    ],
    "tools": [
        {"name": name, "description": f"{name} files", "input_schema": {"$schema": SCHEMA, **SHELL}}
        for name in NAMES
    ],
    "thinking": {"type": "adaptive"}, "metadata": {"user_id": "user_0"},
}  # fmt: skip

OPENCODE = {
    "model": "gpt", "max_tokens": 128, "top_p": 1, "stream": True,
    "stream_options": {"include_usage": True}, "tool_choice": "auto", "tools": [CHAT_TOOL],
    "messages": [
        {"role": "system", "content": "You are an agent.\n<env>linux</env>"},
        {"role": "user", "content": "Say hello"},
    ],
}  # fmt: skip

AIDER = {
    "model": "gpt", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "Act as an expert software developer."},
        {"role": "user", "content": "What does it do?"},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Say hello"},
    ],
}  # fmt: skip

OPEN_WEBUI = {
    "model": "gpt", "stream": True, "messages": [{"role": "user", "content": "Say hello"}],
}  # fmt: skip


def events(http: httpx.Client, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    """The data of each event; OpenAI's chats end with one that is no JSON."""
    reply = http.post(path, json=body, **options)
    assert reply.status_code == 200, reply.text
    told = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(data) if data != "[DONE]" else data for data in told]


def test_the_server_takes_the_shipped_model_by_default_and_its_context_an_agents_prompt() -> None:
    given = get_command(app()).commands["serve"].make_context("serve", []).params
    assert given["model"] == "etude"
    assert given["context"] is None, "so it is the model's own"
    assert read_config(shipped_folder("etude") / "config.json").context_tokens >= 65_536


def test_a_conversation_without_a_limit_ends(http) -> None:
    card, *_ = http.get("/v1/models").json()["data"]
    asked = {"messages": [{"role": "user", "content": "Say hello"}], "temperature": 0}
    reply = http.post("/v1/chat/completions", json=asked).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == card["default_max_tokens"] == 1024


def test_codex(http) -> None:
    told = events(http, "/v1/responses", CODEX)
    kinds = [event["type"] for event in told]
    assert kinds[0] == "response.created"
    assert "response.output_item.done" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")
    response = told[-1]["response"]
    assert response["output"]
    assert response["usage"]["output_tokens"] <= 1024, "no limit was asked for"
    assert [tool["name"] for tool in response["tools"]] == ["shell", "update_plan"]


def test_claude_code(http) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    asked = {k: CLAUDE_CODE[k] for k in ("model", "system", "messages", "tools")}
    url = "/v1/messages/count_tokens?beta=true"
    counted = http.post(url, json=asked, headers=headers).json()["input_tokens"]
    told = events(http, "/v1/messages?beta=true", CLAUDE_CODE, headers=headers)
    kinds = [event["type"] for event in told]
    assert kinds[0] == "message_start"
    assert told[0]["message"]["usage"]["input_tokens"] == counted
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert told[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")


@pytest.mark.parametrize(
    "body", [OPENCODE, AIDER, OPEN_WEBUI], ids=["opencode", "aider", "Open WebUI"]
)
def test_chat_clients(http, body) -> None:
    *chunks, end = events(http, "/v1/chat/completions", body)
    assert end == "[DONE]"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert reasons[-1] in ("stop", "length", "tool_calls")
    assert set(reasons[:-1]) == {None}
    if "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] <= body.get("max_tokens", 1024)


def test_a_forced_call_of_the_shipped_model_can_be_read(http) -> None:
    limited = {**CHAT_TOOL["function"], "parameters": {"enum": [{"command": ["ls"]}]}}
    body = {
        **{name: OPENCODE[name] for name in ("model", "messages", "max_tokens")},
        "tools": [{"type": "function", "function": limited}],
        "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"command": ["ls"]}
