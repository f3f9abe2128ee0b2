"""Requests that switch reasoning on and off, in the words of three APIs."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from server.running import Scripted, running, scripted, wait_until_ready
from soloist.server.serve import Server

# A prompt that says what the template was told.
TOLD = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}{{ 'y ' * 5 if enable_thinking else 'n' }}{% endif %}"
)
LEVELS = TOLD + "{{ reasoning_effort }} <think>"
QUESTION = [{"role": "user", "content": "x"}]
ASK = {"model": "gpt", "messages": QUESTION, "max_tokens": 1}
ON, OFF, DEFAULT = "xy y y y y ", "xn", "x"


def served(template: str) -> Iterator[Server]:
    with running(lambda _: scripted(Scripted("x"), template=template)) as server:
        yield wait_until_ready(server)


@pytest.fixture(scope="module")
def switched() -> Iterator[Server]:
    yield from served(TOLD)


@pytest.fixture(scope="module")
def levelled() -> Iterator[Server]:
    yield from served(LEVELS)


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def prompt(server: Server, **fields: object) -> str:
    """What a chat's template wrote."""
    body = {"return_token_ids": True} | fields
    with openai_client(server) as client:
        reply = client.chat.completions.create(**ASK, extra_body=body)
    return server.host.ready().engine.tokenizer.decode(reply.prompt_token_ids)


@pytest.mark.parametrize(
    ("effort", "wanted", "words"),
    [
        (None, DEFAULT, None), ("none", OFF, None), ("minimal", OFF, "is off"),
        ("low", ON, "'low': this model knows on and off alone; its reasoning is on"),
        ("high", ON, "is on"),
    ],
)  # fmt: skip
def test_efforts_of_chats_and_responses(switched, effort, wanted, words) -> None:
    assert prompt(switched, reasoning_effort=effort) == wanted
    count = len(switched.host.ready().engine.tokenizer.encode(wanted, add_special_tokens=False))
    with openai_client(switched) as client:
        ask = {"model": "gpt", "input": "x", "reasoning": {"effort": effort, "summary": "auto"}}
        response = client.responses.create(**ask, max_output_tokens=1)
        assert response.usage.input_tokens == count
        (*_, last) = client.responses.create(**ask, max_output_tokens=1, stream=True)
        assert getattr(last.response, "warnings", None) == getattr(response, "warnings", None)
        ask = {**ASK, "reasoning_effort": effort}
        chat = client.chat.completions.create(**ask)
        (*_, end) = client.chat.completions.create(**ask, stream=True)
    for reply in (response, chat, end):
        told = " ".join(getattr(reply, "warnings", []))
        assert (words in told) if words else not told


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        ({"type": "disabled"}, OFF), ({"type": "adaptive"}, ON),
        ({"type": "enabled", "budget_tokens": 1024}, ON),
    ],
)  # fmt: skip
def test_thinking_of_messages(switched, thinking, wanted) -> None:
    count = len(switched.host.ready().engine.tokenizer.encode(wanted, add_special_tokens=False))
    with anthropic.Anthropic(base_url=switched.url, api_key="x", max_retries=0) as claude:
        reply = claude.messages.create(**ASK, thinking=thinking)
        with claude.messages.stream(**ASK, thinking=thinking) as stream:
            final = stream.get_final_message()
    assert reply.usage.input_tokens == count
    for one in (reply, final):
        told = getattr(one, "warnings", [])
        assert ["budget_tokens" in x for x in told] == [True] * ("budget_tokens" in thinking)


def test_a_level_is_the_templates_own(levelled) -> None:
    assert prompt(levelled, reasoning_effort="low") == ON + "low <think>"
    assert prompt(levelled, reasoning_effort="none") == OFF + "none <think>"
    with openai_client(levelled) as client:
        reply = client.chat.completions.create(**ASK, reasoning_effort="low")
    assert not hasattr(reply, "warnings")


def test_two_fields_that_contradict_each_other(switched) -> None:
    given = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(switched, reasoning_effort="high", **given) == ON
    with pytest.raises(openai.BadRequestError, match=r"chat_template_kwargs\.enable_thinking"):
        prompt(switched, reasoning_effort="none", **given)
    with pytest.raises(openai.BadRequestError, match="'none', 'minimal', 'low'"):
        prompt(switched, reasoning_effort="little")
