"""Calls as several families write them, through the official clients."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anthropic
import openai
import pytest

from server.running import Scripted, etude, running, scripted, wait_until_ready
from soloist.engine import Engine
from soloist.text import Tokenizer

PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "array"}, "exact": {"type": ["boolean", "null"]},
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ASK = {"model": "gpt", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "exact": True}

LISTED = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function | tojson }}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %} {{ c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{{ '\\n' }}{% endfor %}"
)
VALUES = "{{ tools }}<tool_call>\n<function=f>\n<parameter=a>\n{% for m in messages %}x{% endfor %}"
PYTHON = "{{ tools }} as [func_name1(a=b)]{% for m in messages %}x{% endfor %}"

FORMATS = {
    "a list": (LISTED, '[TOOL_CALLS] [{"name": "weather", "arguments": %s}]'),
    "a name": (LISTED, "[TOOL_CALLS]weather[ARGS]%s"),
    "values": (
        VALUES,
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n"
        "[1, 2]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
    ),
    "python": (PYTHON, "[weather(city='Zürich', days=[1, 2], exact=True)]"),
}


@pytest.fixture(scope="module")
def marked(tmp_path_factory) -> Path:
    """Étude's files, with Mistral's marks as special tokens, which texts leave out."""
    folder = tmp_path_factory.mktemp("marked")
    for file in etude().report.folder.glob("*.json"):
        shutil.copy(file, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text("utf-8")
        text = text.replace("<|reserved_0|>", "[TOOL_CALLS]").replace("<|reserved_1|>", "[ARGS]")
        (folder / name).write_text(text, "utf-8")
    return folder


@contextmanager
def served(folder: Path, template: str, answer: str) -> Iterator[tuple[str, Engine]]:
    tokenizer = Tokenizer.from_folder(folder)
    executor = Scripted("x", 400)
    executor.script = tokenizer.encode(answer) + sorted(tokenizer.eos_ids)[:1]
    real = scripted(executor)
    templates = {"default": template}
    engine = Engine(real.config, executor, real.resolved, folder, real.report, templates)
    with running(lambda _: engine) as server:
        yield wait_until_ready(server).url, engine


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_whole_and_streamed(marked, name) -> None:
    template, answer = FORMATS[name]
    answer = answer.replace("%s", json.dumps(ARGUMENTS, ensure_ascii=False))
    with served(marked, template, answer) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            choice = client.chat.completions.create(**ASK).choices[0]
            (call,) = choice.message.tool_calls
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments) == ARGUMENTS
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            for _ in range(5):  # a busy machine may hand over many tokens at once
                with client.chat.completions.stream(**ASK) as stream:
                    events = list(stream)
                    (final,) = stream.get_final_completion().choices[0].message.tool_calls
                assert final.function.arguments == call.function.arguments
                pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
                if len(pieces) > 2:
                    break
            assert len(pieces) > 2, "arguments come as they are written"
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as claude:
            tools = [{"name": "weather", "input_schema": PARAMETERS}]
            (block,) = claude.messages.create(**ASK | {"tools": tools, "max_tokens": 200}).content
            assert block.input == ARGUMENTS


def test_without_tools_special_marks_stay_out_of_the_text(marked) -> None:
    with (
        served(marked, LISTED, 'So [TOOL_CALLS]f[ARGS]{"a": 1}') as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        plain = {key: value for key, value in ASK.items() if key != "tools"}
        assert client.chat.completions.create(**plain).choices[0].message.content == 'So f{"a": 1}'


def test_ids_of_calls_are_as_long_as_mistrals_templates_want_them(marked) -> None:
    calls = [
        {"id": number, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for number in ("call_0123456789", "abcdefghi")
    ]
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sun"},
    ]
    with served(marked, LISTED, "Rain.") as (url, engine):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            more = {"extra_body": {"return_token_ids": True}}
            reply = client.chat.completions.create(**ASK | {"messages": messages}, **more)
        text = engine.tokenizer.decode(reply.prompt_token_ids, skip_special_tokens=False)
    _, assistant, rain, sun = text.splitlines()
    first, second = (part.split()[-1] for part in assistant.split("[TOOL_CALLS]")[1:])
    assert rain == f"tool rain[{first}]"
    assert sun == f"tool sun[{second}]"
    assert second == "abcdefghi", "what fits is kept"
    assert first != second


def test_tokenize_gives_the_prompt_that_a_chat_has(marked) -> None:
    import httpx2

    body = {"messages": ASK["messages"], "tools": TOOLS}
    with served(marked, VALUES, "x") as (url, _), httpx2.Client(base_url=url) as http:
        told = http.post("/tokenize", json=body).json()
        chat = http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
        assert told["tokens"] == chat["prompt_token_ids"]
        refused = http.post("/tokenize", json={"prompt": "x", "tools": TOOLS})
        assert refused.json()["error"]["param"] == "tools"
