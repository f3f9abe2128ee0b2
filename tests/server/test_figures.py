"""Counts while an answer is made, and after it was stopped."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

CHAT = {"model": "gpt", "messages": [{"role": "user", "content": "def f(x):"}]}
COUNTS = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
ASKED = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "gpt", "prompt": "def f(x):"},
}
SCHEMA = {
    "type": "object",
    "properties": {"a_rather_long_name": {"type": "boolean"}},
    "required": ["a_rather_long_name"],
    "additionalProperties": False,
}


def chunks(reply: Any) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", ASKED)
def test_a_request_that_is_stopped_tells_what_it_made(http, path) -> None:
    body = ASKED[path] | COUNTS | {"max_tokens": 1500, "ignore_eos": True}
    with http.stream("POST", path, json=body) as reply:
        told = chunks(reply)
        first = next(told)
        http.delete(f"{path}/{first['id']}")
        *rest, last = told
    assert last["error"]["code"] == "cancelled"
    usage, timings = last["usage"], last["timings"]
    before = [chunk["usage"]["completion_tokens"] for chunk in (first, *rest)]
    assert 0 < max(before) <= usage["completion_tokens"] < 1500
    assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"] == first["usage"]["prompt_tokens_details"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["mbu"] is not None


def test_the_longest_gap_of_an_answer_is_told(http) -> None:
    body = CHAT | {"max_tokens": 40, "ignore_eos": True}
    timings = http.post("/v1/chat/completions", json=body).json()["timings"]
    each = timings["predicted_ms"] / (timings["predicted_n"] - 1)
    assert each <= timings["longest_gap_ms"] <= timings["predicted_ms"]
    alone = http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()["timings"]
    assert alone["longest_gap_ms"] == 0
    told = dict(
        line.rsplit(" ", 1)
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("soloist_longest_gap_seconds_")
    )
    assert float(told["soloist_longest_gap_seconds_count"]) >= 1
    assert float(told["soloist_longest_gap_seconds_sum"]) > timings["longest_gap_ms"] / 2e3


def test_forced_and_cached_tokens_are_counted_as_they_come(http) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    long = {"messages": [{"role": "user", "content": "# a line of a long prompt\n" * 60}]}
    body = CHAT | long | COUNTS | {"response_format": form}
    for is_cached in (False, True):
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            seen = [chunk for chunk in chunks(reply) if chunk.get("usage")]
        first, last = (chunk["usage"] for chunk in (seen[0], seen[-1]))
        forced = [one["usage"]["completion_tokens_details"]["forced_tokens"] for one in seen]
        assert forced == sorted(forced)
        assert 3 < forced[-1] < last["completion_tokens"]
        cached = first["prompt_tokens_details"]["cached_tokens"]
        assert cached == last["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == is_cached
        timings = next(one["timings"] for one in seen if "timings" in one)
        assert timings["forced_n"] == forced[-1]
