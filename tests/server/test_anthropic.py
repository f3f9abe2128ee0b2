"""Anthropic's official client: messages, streams, counts and errors."""

from collections.abc import Iterator

import anthropic
import pytest

from server.running import is_idle, oracle, wait_for
from server.test_openai import chat_answer

MESSAGES = [{"role": "user", "content": "A function that adds two numbers"}]
SYSTEM = "Write Python."
PLAIN = [{"role": "system", "content": SYSTEM}, *MESSAGES]


@pytest.fixture
def claude(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def ask(**changed):
    base = {"model": "gpt", "max_tokens": 20, "messages": MESSAGES, "system": SYSTEM}
    # This client has no names for what chooses tokens.
    return base | {"extra_body": {"temperature": 0}} | changed


def test_a_message_is_the_engines(claude) -> None:
    wanted = chat_answer(PLAIN, max_tokens=20)
    reply = claude.messages.create(**ask())
    assert reply.content[0].text == wanted.text
    assert reply.role == "assistant"
    assert reply.model == "gpt"
    assert reply.stop_reason == ("max_tokens" if wanted.finish_reason == "length" else "end_turn")
    assert reply.usage.output_tokens == len(wanted.token_ids)
    seen = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert seen == wanted.timings.prompt_tokens


def test_a_stream_is_the_same_message(claude) -> None:
    wanted = claude.messages.create(**ask(max_tokens=40))
    with claude.messages.stream(**ask(max_tokens=40)) as stream:
        events = [e for e in stream if e.type != "text"]
        final = stream.get_final_message()
    assert final.content[0].text == wanted.content[0].text
    assert final.stop_reason == wanted.stop_reason
    assert final.usage.output_tokens == wanted.usage.output_tokens
    seen = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert seen == wanted.usage.input_tokens + wanted.usage.cache_read_input_tokens
    kinds = [e.type for e in events]
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_blocks_stop_sequences_and_prefilled_answers(claude) -> None:
    text = chat_answer(PLAIN, max_tokens=40).text
    stop = text[8:11]
    text_block = {"type": "text", "text": MESSAGES[0]["content"]}
    blocks = [text_block | {"cache_control": {"type": "ephemeral"}}]
    reply = claude.messages.create(
        **ask(
            messages=[{"role": "user", "content": blocks}], stop_sequences=[stop], max_tokens=40,
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
                {"type": "text", "text": SYSTEM},
            ],
        )
    )  # fmt: skip
    assert reply.content[0].text == text[: text.index(stop)]
    assert reply.stop_reason == "stop_sequence"
    assert reply.stop_sequence == stop
    begun = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    chat = [{"role": "system", "content": SYSTEM}, *begun]
    prompt = oracle().chat_template.render(chat, continue_final_message=True)
    *_, wanted = oracle().generate(
        oracle().tokenizer.encode(prompt, add_special_tokens=False), wanted_params()
    )
    assert claude.messages.create(**ask(messages=begun)).content[0].text == wanted.text


def wanted_params():
    from soloist.sampling import SamplingParams

    return SamplingParams(max_tokens=20)


def test_what_claude_code_sends_beside_its_messages(claude) -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    wanted = chat_answer([*PLAIN, later | {"content": "Be brief."}], max_tokens=20)
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    more = {"temperature": 0, "context_management": keep, "output_config": {"effort": "high"}}
    more["cache_control"] = {"type": "ephemeral"}
    reply = claude.messages.create(
        **ask(messages=[*MESSAGES, later], thinking={"type": "adaptive"}, extra_body=more)
    )
    assert reply.content[0].text == wanted.text


def test_counts(claude) -> None:
    counted = claude.messages.count_tokens(model="gpt", messages=MESSAGES, system=SYSTEM)
    assert counted.input_tokens == len(oracle().encode_chat(PLAIN))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tools": [{"type": "web_search_1", "name": "f"}]}, r"tools\[0\].type is not supported"),
        ({"tool_choice": {"type": "any"}}, "a call is required, but tools has none to call"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "this model does not reason"),
        ({"max_tokens": 5000}, r"`max_tokens` exceed context limit: \d+ \+ 5000 > 2048, decrease"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\]: .* at least 1 character"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "system", "content": 3}]}, "expected a text or a list"),
        (
            {"extra_body": {"output_config": {"effort": "low"}}},
            "output_config.effort is not supported",
        ),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}},
            "context_management is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content\[0\].type is not supported",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": "x",
                                "is_error": "yes",
                            }
                        ],
                    }
                ]
            },
            r"messages\[0\].content\[0\].is_error: expected true or false",
        ),
        ({"extra_body": {"colour": 1}}, "colour is not supported"),
        ({"extra_body": {"top_k": 0, "temperature": 7000}}, "0.01 … 100"),
    ],
)
def test_refusals_are_anthropics_errors(claude, changed, words) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        claude.messages.create(**ask(**changed))
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(claude) -> None:
    long = [{"role": "user", "content": "x = 1\n" * 3000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 m"):
        claude.messages.create(**ask(messages=long))


def test_unknown_models_and_closed_streams(claude, server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        claude.messages.create(**ask(model="claude"))
    endless = ask(max_tokens=1900, extra_body={"temperature": 1})
    with claude.messages.stream(**endless) as stream:
        next(iter(stream))
    wait_for(lambda: is_idle(server))
    with claude.messages.stream(**endless) as stream:
        begun = next(iter(stream)).message
        claude.delete(f"/v1/messages/{begun.id}", cast_to=object)
        with pytest.raises(anthropic.APIStatusError, match="cancelled through the API"):
            list(stream)


def test_what_was_cached_is_no_input(claude) -> None:
    long = [{"role": "user", "content": "".join(f"y_{i} = {i}\n" for i in range(90))}]
    first = claude.messages.create(**ask(messages=long)).usage
    assert first.cache_read_input_tokens == 0
    again = claude.messages.create(**ask(messages=long)).usage
    assert again.cache_read_input_tokens == first.input_tokens // 128 * 128 > 0
    assert again.input_tokens == first.input_tokens - again.cache_read_input_tokens
    with claude.messages.stream(**ask(messages=long)) as stream:
        start = next(iter(stream))
        assert start.message.usage.cache_read_input_tokens == again.cache_read_input_tokens
