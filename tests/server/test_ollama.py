"""Ollama's API, as its official client and its documentation's curl lines speak it."""

import json
from collections.abc import Iterator

import httpx2
import pytest

from server.running import (
    KEY,
    Scripted,
    etude,
    is_idle,
    oracle,
    running,
    wait_for,
    wait_until_ready,
    with_tools,
)
from server.test_openai import answer, chat_answer
from server.test_tools import ARGUMENTS, TEXT, TOOLS
from soloist.server.ollama_conversation import plain_conversation
from soloist.server.preparation.ollama import OllamaChatRequest, prepare_ollama_chat
from soloist.server.problems import Problem

MESSAGES = [{"role": "user", "content": "A function that adds two numbers"}]
GREEDY = {"temperature": 0, "num_predict": 20}
CHAT = {"model": "gpt", "messages": MESSAGES, "options": GREEDY}
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def lines(reply: httpx2.Response) -> list[dict]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def error(reply: httpx2.Response) -> str:
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_a_chat_is_the_engines(http) -> None:
    wanted = chat_answer(MESSAGES, max_tokens=20)
    reply = http.post("/api/chat", json=CHAT | {"stream": False}).json()
    assert reply["model"] == "gpt"
    assert reply["message"] == {"role": "assistant", "content": wanted.text}
    assert reply["done"] is True
    assert reply["done_reason"] == ("length" if wanted.finish_reason == "length" else "stop")
    assert reply["eval_count"] == len(wanted.token_ids)
    assert reply["prompt_eval_count"] == wanted.timings.prompt_tokens
    assert all(isinstance(reply[name], int) for name in DURATIONS)
    assert reply["total_duration"] >= reply["eval_duration"] > 1000, "nanoseconds"


def test_a_stream_is_the_same_in_lines(http) -> None:
    whole = http.post("/api/chat", json=CHAT | {"stream": False}).json()
    told = lines(http.post("/api/chat", json=CHAT | {"model": "gpt:latest"}))
    assert "".join(line["message"]["content"] for line in told) == whole["message"]["content"]
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["eval_count"] == whole["eval_count"]
    assert told[0]["model"] == "gpt:latest"


def test_bodies_as_curl_sends_them(http) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    ask = json.dumps(CHAT | {"stream": False})
    reply = http.post("/api/chat", content=ask, headers=form)
    assert reply.json()["message"]["content"] == chat_answer(MESSAGES, max_tokens=20).text
    page = form | {"Origin": http.base_url.scheme + "://" + http.base_url.netloc.decode()}
    assert http.post("/api/chat", content=ask, headers=page).status_code == 415
    page["Origin"] = "http://elsewhere.example"
    assert http.post("/api/chat", content=ask, headers=page).status_code == 403


def test_generating(http) -> None:
    ask = {"model": "gpt", "stream": False, "options": GREEDY}
    system = [{"role": "system", "content": "Write Python."}]
    reply = http.post(
        "/api/generate", json=ask | {"prompt": MESSAGES[0]["content"], "system": "Write Python."}
    )
    assert reply.json()["response"] == chat_answer([*system, *MESSAGES], max_tokens=20).text
    raw = http.post("/api/generate", json=ask | {"prompt": "def add(a, b):", "raw": True}).json()
    assert raw["response"] == answer("def add(a, b):", max_tokens=20).text
    told = lines(
        http.post(
            "/api/generate", json={**ask, "prompt": "def add(a, b):", "raw": True, "stream": True}
        )
    )
    assert "".join(line["response"] for line in told) == raw["response"]
    filled = http.post(
        "/api/generate", json=ask | {"prompt": "def add(a, b):\n", "suffix": "\n\nprint(add(1, 2))"}
    ).json()
    ids = oracle().tokenizer.fim_prompt("def add(a, b):\n", "\n\nprint(add(1, 2))")
    assert filled["prompt_eval_count"] == len(ids)


def test_options_choose_tokens(http) -> None:
    ask = CHAT | {"stream": False}
    text = chat_answer(MESSAGES, max_tokens=20).text
    stop = text[8:11]
    reply = http.post("/api/chat", json=ask | {"options": GREEDY | {"stop": [stop]}}).json()
    assert reply["message"]["content"] == text[: text.index(stop)]
    options = {"temperature": 1.5, "seed": 7, "num_predict": 12, "num_gpu": 99, "num_ctx": 1024}
    first, second = (
        http.post("/api/chat", json=ask | {"options": options}).json()["message"] for _ in "12"
    )
    assert first == second
    assert first["content"] != text[: len(first["content"])]
    options["seed"] = -1  # Ollama's word for another one each time
    drawn = {
        http.post("/api/chat", json=ask | {"options": options}).json()["message"]["content"]
        for _ in range(4)
    }
    assert len(drawn) > 1
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form["additionalProperties"] = False
    held = http.post("/api/chat", json=ask | {"format": form, "options": {"seed": 1}}).json()
    assert json.loads(held["message"]["content"])["a"] in (1, 2)
    held = http.post("/api/chat", json=ask | {"format": "json"}).json()
    assert held["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"colour": 1}, "colour is not supported"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported (allowed: 0)"),
        ({"options": {"num_ctx": 10**6}}, "1,000,000 (allowed: at most 2,048"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"colour": 1}}, "options.colour is not supported"),
        ({"format": "yaml"}, "'json', or a JSON schema"),
        ({"think": True}, "does not reason"),
        ({"think": "high"}, "allowed: true, false"),
        ({"messages": [MESSAGES[0] | {"images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [MESSAGES[0] | {"colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"a": 1}]}]}, "tool_calls[0]"),
        ({"messages": [], "keep_alive": 0}, "stays loaded"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, changed, words) -> None:
    assert words in error(http.post("/api/chat", json=CHAT | changed))


@pytest.mark.parametrize("name", ["images", "context", "template"])
def test_generate_refuses_what_it_would_ignore(http, name) -> None:
    ask = {"model": "gpt", "prompt": "x", name: "x" if name == "template" else [1]}
    assert f"{name} is not supported" in error(http.post("/api/generate", json=ask))
    ask = {"model": "gpt", "prompt": "x", "raw": True, "system": "x"}
    assert "system beside raw" in error(http.post("/api/generate", json=ask))


def test_a_request_without_a_prompt_only_loads(http) -> None:
    (told,) = lines(http.post("/api/generate", json={"model": "gpt", "keep_alive": -1}))
    assert (told["done"], told["done_reason"], told["response"]) == (True, "load", "")
    reply = http.post("/api/chat", json={"model": "gpt", "messages": [], "stream": False}).json()
    assert reply["done_reason"] == "load"
    assert reply["message"]["content"] == ""


def test_what_the_server_has(http) -> None:
    (first, _) = http.get("/api/tags").json()["models"]
    assert first["name"] == first["model"] == "etude-draft:latest"
    (loaded, _) = http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == etude().resolved.context_tokens
    shown = http.post("/api/show", json={"model": first["name"]}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == etude().resolved.context_tokens
    assert shown["capabilities"] == ["completion", "tools", "insert"]
    assert http.get("/api/version").json()["version"].count(".") == 2
    assert http.head("/").status_code == 200
    missing = http.post("/api/show", json={"model": "other"})
    assert missing.status_code == 404
    assert "etude-draft" in missing.json()["error"]


def test_keys_are_asked_for() -> None:
    with running(lambda _: etude(), api_keys=(KEY,)) as made:
        wait_until_ready(made)
        with httpx2.Client(base_url=made.url) as http:
            for path in ("/api/tags", "/api/ps", "/api/version"):
                assert http.get(path).status_code == 401
            refused = http.post("/api/chat", json=CHAT)
            assert refused.status_code == 401
            assert "API key" in refused.json()["error"]
            key = {"Authorization": f"Bearer {KEY}"}
            assert http.get("/api/tags", headers=key).status_code == 200


def test_a_client_that_goes_ends_its_request(server, http) -> None:
    long = CHAT | {"options": {"temperature": 0, "num_predict": 1500}}
    with http.stream("POST", "/api/chat", json=long) as reply:
        next(reply.iter_lines())
    wait_for(lambda: is_idle(server))


@pytest.fixture(scope="module")
def calling() -> Iterator[str]:
    with running(lambda _: with_tools(Scripted(TEXT, 400, ends=True))) as server:
        yield wait_until_ready(server).url


def test_calls_have_objects_and_reasoning_is_apart(calling) -> None:
    ask = {"model": "gpt", "messages": MESSAGES, "tools": TOOLS, "options": {"temperature": 0}}
    with httpx2.Client(base_url=calling, timeout=30) as http:
        whole = http.post("/api/chat", json=ask | {"stream": False}).json()
        told = lines(http.post("/api/chat", json=ask))
    message = whole["message"]
    assert whole["done_reason"] == "stop"
    assert message["content"] == "Let me see."
    assert message["thinking"] == "They want it."
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"index": 0, "name": "weather", "arguments": ARGUMENTS},
        {"index": 1, "name": "t", "arguments": ARGUMENTS},
    ]
    streamed = [call for line in told for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in streamed] == functions
    assert "".join(line["message"].get("thinking", "") for line in told) == "They want it."
    assert "".join(line["message"]["content"] for line in told) == "Let me see."


def test_thinking_is_the_templates_switch() -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    processor = with_tools(Scripted(), template=template).processor

    def prompt(think: bool | None) -> str:
        asked = OllamaChatRequest(model="gpt", messages=MESSAGES, think=think)
        prepared = prepare_ollama_chat(processor, asked, "gpt")
        return processor.tokenizer.decode(prepared.prompts[0].prompt_ids)

    assert prompt(True) == MESSAGES[0]["content"] + "<think>"
    assert prompt(False) == prompt(None) == MESSAGES[0]["content"]
    always = with_tools(Scripted(), template="{{ messages[0].content }}<think>").processor
    asked = OllamaChatRequest(model="gpt", messages=MESSAGES, think=False)
    with pytest.raises(Problem, match="always reasons"):
        prepare_ollama_chat(always, asked, "gpt")


def test_results_belong_to_calls_in_their_order() -> None:
    def call(name: str) -> dict:
        return {"function": {"name": name, "arguments": {}}}

    chat = plain_conversation(
        [
            {"role": "assistant", "thinking": "hm", "tool_calls": [call("a"), call("b")]},
            {"role": "tool", "content": "2", "tool_name": "b"},
            {"role": "tool", "content": "1"},
        ],
        "",
    )
    first, second = (made["id"] for made in chat[0]["tool_calls"])
    assert chat[0]["reasoning_content"] == "hm"
    assert (chat[1]["tool_call_id"], chat[1]["name"]) == (second, "b")
    assert (chat[2]["tool_call_id"], chat[2]["name"]) == (first, "a")


def test_the_official_client(server, calling) -> None:
    ollama = pytest.importorskip("ollama")
    wanted = chat_answer(MESSAGES, max_tokens=20).text
    with ollama.Client(host=server.url) as client:
        assert client.chat("gpt", MESSAGES, options=GREEDY).message.content == wanted
        stream = client.chat("gpt", MESSAGES, options=GREEDY, stream=True)
        assert "".join(part.message.content for part in stream) == wanted
        reply = client.generate("gpt", "def add(a, b):", raw=True, options=GREEDY)
        assert reply.response == answer("def add(a, b):", max_tokens=20).text
        assert reply.eval_duration > 0
        assert client.list().models[0].model == "etude-draft:latest"
        assert client.show("gpt").capabilities == ["completion", "tools", "insert"]
        assert client.ps().models[0].context_length == etude().resolved.context_tokens
        with pytest.raises(ollama.ResponseError, match="does not exist here") as refused:
            client.chat("other", MESSAGES)
        assert refused.value.status_code == 404

    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return city

    def t() -> str:
        """The time."""
        return "now"

    with ollama.Client(host=calling) as client:
        message = client.chat("gpt", MESSAGES, tools=[weather, t]).message
        assert [one.function.arguments for one in message.tool_calls] == [ARGUMENTS] * 2
        chat = [*MESSAGES, message, {"role": "tool", "content": "sunny", "tool_name": "weather"}]
        assert client.chat("gpt", chat, tools=[weather, t], think=True).message.thinking
