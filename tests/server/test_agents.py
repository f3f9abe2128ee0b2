"""Requests as Codex and Claude Code send them, shortened: answered, and told what was left out."""

from collections.abc import Iterator

import httpx2 as httpx
import openai
import pytest

from server.running import Scripted, running, wait_until_ready, with_tools
from server.test_tools import CLAUDE_TOOLS, ITEM_TOOLS, TEXT, TOOLS
from soloist.server.serve import Server

CODEX = {
    "model": "gpt",
    "instructions": "You are Codex, based on GPT-5.",
    "input": [
        {
            "type": "message", "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions instructions>"}],
        },
        {
            "type": "message", "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>"}],
        },
        {
            "type": "message", "role": "user",
            "content": [{"type": "input_text", "text": "Weather?"}],
        },
    ],
    "tools": [
        {"type": "web_search", "external_web_access": False},
        {**ITEM_TOOLS[0], "description": "Runs a command.", "strict": False},
        {"type": "namespace", "name": "agents", "description": "", "tools": [ITEM_TOOLS[1]]},
        ITEM_TOOLS[1],
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": None,
    "prompt_cache_key": "0198a1b2",
    "text": {"verbosity": "medium"},
    "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}},
}  # fmt: skip

CLAUDE = {
    "model": "gpt",
    "max_tokens": 2000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=00;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>"},
                {"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        *CLAUDE_TOOLS,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 1999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
LEFT_OUT = "tools[{}] was left out: type '{}' cannot run here"


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with running(lambda _: with_tools(Scripted(TEXT, ends=True))) as server:
        yield wait_until_ready(server)


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def test_codex(client) -> None:
    first, *_, last = client.responses.create(**CODEX)
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output][-1] == "function_call"
    assert first.response.warnings == last.response.warnings
    assert last.response.warnings[:2] == [
        LEFT_OUT.format(0, "web_search"), LEFT_OUT.format(2, "namespace"),
    ]  # fmt: skip
    assert [tool.name for tool in last.response.tools] == ["weather", "t"], "those that count"


def test_claude_code(served) -> None:
    with httpx.Client(base_url=served.url) as http:
        reply = http.post("/v1/messages?beta=true", json=CLAUDE)
    assert reply.status_code == 200
    assert LEFT_OUT.format(2, "web_search_20250305") in reply.text
    assert "message_stop" in reply.text


@pytest.mark.parametrize(
    ("path", "tools", "said"),
    [
        ("/chat/completions", TOOLS, {"messages": CLAUDE["messages"]}),
        ("/responses", ITEM_TOOLS, {"input": "Weather?"}),
        ("/messages", CLAUDE_TOOLS, {"messages": CLAUDE["messages"], "max_tokens": 9}),
        ("/messages/count_tokens", CLAUDE_TOOLS, {"messages": CLAUDE["messages"]}),
    ],
)
def test_a_tool_that_was_left_out_is_no_part_of_the_prompt(client, path, tools, said) -> None:
    hosted = {"type": "mcp", "server_label": "x"}

    def ask(*tools: dict[str, object]) -> dict:
        body = {"model": "gpt", "tools": tools, **said}
        return client.post(path, body=body, cast_to=object)

    def length(reply: dict) -> int:
        usage = reply.get("usage", reply)
        count = usage.get("prompt_tokens") or usage["input_tokens"]
        return count + usage.get("cache_read_input_tokens", 0)

    plain, told, bare = ask(*tools), ask(hosted, *tools), ask(hosted)
    assert "warnings" not in plain
    assert told["warnings"] == bare["warnings"] == [LEFT_OUT.format(0, "mcp")]
    assert length(plain) == length(told) > length(bare)


def test_places_of_tools_are_those_of_the_request(client) -> None:
    bad = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "nothing"}}
    tools = [{"type": "image_generation"}, {"type": "web_search_preview_2025_03_11"}, bad]
    with pytest.raises(openai.BadRequestError, match=r"tools\[2\]\.parameters"):
        client.responses.create(model="gpt", input="x", tools=tools)
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.type is not supported"):
        client.responses.create(
            model="gpt", input="x", tools=[tools[0], {"type": "custom", "name": "apply_patch"}]
        )
    with pytest.raises(openai.BadRequestError, match="tools has none to call"):
        client.responses.create(model="gpt", input="x", tools=tools[:2], tool_choice="required")
