"""Requests that programs sent in turns with a call of a tool, in November 2026: all are answered.

`recorded.json` has them by program and version, without headers. They are shortened: long texts to
two words, tools to one of each form and those that were called, schemas to a few properties.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from server.running import Scripted, running, scripted, wait_until_ready
from soloist.server.serve import Server

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "recorded.json").read_text("utf-8")
)
SAID = "It is done."
# What the reply tells of tools that cannot run here, and of nothing else.
LEFT_OUT = {"codex 0.169.0": ["type 'namespace'", "type 'web_search'"]}


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """The shipped model's template and tokens, with room for any limit."""
    with running(lambda _: scripted(Scripted(SAID, ends=True), 65_536)) as server:
        yield wait_until_ready(server)


def events(reply: httpx.Response) -> list[Any]:
    """The data of each event, or each line of Ollama's stream."""
    lines = reply.text.splitlines()
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [line[6:] for line in lines if line.startswith("data: ") and line[6:] != "[DONE]"]
    return [json.loads(line) for line in lines]


def text_and_end(path: str, told: list[Any]) -> tuple[str, str]:
    """What the program shows, and what tells it that the turn is over."""
    match path.partition("?")[0]:
        case "/v1/responses":
            deltas = [e["delta"] for e in told if e["type"] == "response.output_text.delta"]
            return "".join(deltas), told[-1]["response"]["status"]
        case "/v1/messages":
            deltas = [e["delta"] for e in told if e["type"] == "content_block_delta"]
            (end,) = [e["delta"] for e in told if e["type"] == "message_delta"]
            return "".join(d["text"] for d in deltas), end["stop_reason"]
        case "/v1/chat/completions":
            choices = [c for e in told for c in e["choices"]]
            parts = [(c.get("delta") or c.get("message") or {}).get("content") for c in choices]
            return "".join(filter(None, parts)), choices[-1]["finish_reason"]
        case _:
            return "".join(e["message"]["content"] for e in told), told[-1]["done_reason"]


@pytest.mark.parametrize(
    ("program", "number"),
    [(program, n) for program, requests in RECORDED.items() for n in range(len(requests))],
)
def test_a_recorded_request_is_answered(served, program, number) -> None:
    asked = RECORDED[program][number]
    with httpx.Client(base_url=served.url, timeout=30) as http:
        reply = http.post(asked["path"], json=asked["body"])
    assert reply.status_code == 200, reply.text
    told = events(reply)
    text, end = text_and_end(asked["path"], told)
    assert text == SAID
    assert end in ("completed", "end_turn", "stop")
    warnings = sorted({w for one in told for w in (one.get("response") or one).get("warnings", [])})
    wanted = LEFT_OUT.get(program, [])
    assert len(warnings) == len(wanted)
    assert all(words in warning for words, warning in zip(wanted, warnings, strict=True))
