"""Rendered prompts against transformers' `apply_chat_template`, and refusals.

The templates are of our own wording; each follows the prompt format of its family and uses the
Jinja features that the family's published template uses.
"""

import json
from datetime import datetime
from itertools import product
from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as theirs_module
from transformers import PreTrainedTokenizerFast

from soloist.errors import RequestError, TokenizerError
from soloist.model.folder import SHIPPED, shipped_folder
from soloist.text import Tokenizer
from soloist.text.chat import ChatTemplate

FAMILIES = [
    *("llama3", "mistral", "mistral3", "qwen2", "qwen3", "smollm3", "phi3", "phi4"),
    *("granite", "olmo2", "glm4", "gemma3", "laneformer", "etude"),
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "image_token": "<image>"}
TODAY = datetime(2026, 2, 3, 4, 5, 6)

SYSTEM = {"role": "system", "content": "  Be brief. /no_think\n"}
HELLO = {"role": "user", "content": "Hello <b>you</b> & 'me' \"both\"  \n"}
ANSWER = {"role": "assistant", "content": "\n\nGrüße, 世界 😀 \\n "}
THOUGHT = {"role": "assistant", "content": "<think>\nFirst…\n</think>\n\nThen."}
REASONED = {"role": "assistant", "content": "Done", "reasoning_content": "\nWhy <not>?\n"}
AGAIN = {"role": "user", "content": "Und\nnoch\neinmal"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2.5, True]}},
        }
    ],
}
SPOKEN_CALL = CALL | {"content": "Let me look."}
TWO_CALLS = CALL | {"tool_calls": CALL["tool_calls"] * 2}
RESULT = {"role": "tool", "content": '{"sky": "<clear>"}', "tool_call_id": "abcdefghi"}
CONVERSATIONS = {
    "one message": [HELLO],
    "with system": [SYSTEM, HELLO],
    "system alone": [SYSTEM],
    "answered": [HELLO, ANSWER],
    "turns": [SYSTEM, HELLO, ANSWER, AGAIN, THOUGHT, HELLO],
    "thoughts": [HELLO, THOUGHT, AGAIN, THOUGHT],
    "reasoning": [HELLO, REASONED, AGAIN, REASONED],
    "reasoning by other names": [
        HELLO,
        {"role": "assistant", "content": "x", "reasoning": "because", "name": None},
    ],
    "call": [HELLO, CALL],
    "call and result": [SYSTEM, HELLO, SPOKEN_CALL, RESULT, ANSWER, AGAIN],
    "two calls, two results": [HELLO, TWO_CALLS, RESULT, RESULT],
    "two users": [HELLO, AGAIN],
    "parts": [HELLO, {"role": "assistant", "content": [{"type": "text", "text": "part "}]}],
    "unknown role": [HELLO, {"role": "stop", "content": "x"}, AGAIN],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the <weather> & more, für 'dich'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
                "required": ["city"],
            },
        },
    },
    {"type": "retrieval", "function": {"name": "look_up", "strict": True, "parameters": {}}},
]
VARIABLES = [{}, {"enable_thinking": False}, {"enable_thinking": True, "bos_token": "<bos>"}]


@pytest.fixture
def frozen_clock(monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls):
            return TODAY

    monkeypatch.setattr(theirs_module, "datetime", Clock)


def template_of(family: str) -> str:
    file = Path(__file__).parent / "templates" / f"{family}.jinja"
    if family in SHIPPED:
        file = shipped_folder(family) / "chat_template.jinja"
    return file.read_text(encoding="utf-8")


def ours(template: str) -> ChatTemplate:
    named = {name: token for name, token in TOKENS.items() if token}
    return ChatTemplate({"default": template}, special_tokens=named, now=lambda: TODAY)


def outcome(render, *args, **options) -> str:
    """The rendered prompt, or that there is none."""
    try:
        return render(*args, **options)
    except (RequestError, ValueError, TypeError, theirs_module.jinja2.TemplateError):
        return "refused"


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("frozen_clock")
def test_prompts_equal_transformers(family, name, byte_level):
    template = template_of(family)
    their_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, chat_template=template, **TOKENS
    )
    chat = ours(template)
    endings = [(True, False), (False, False), (False, True)]
    for tools, (ask, go_on), variables in product([None, TOOLS, []], endings, VARIABLES):
        options = {
            "tools": tools,
            "add_generation_prompt": ask,
            "continue_final_message": go_on,
        }
        wanted = outcome(
            their_tokenizer.apply_chat_template, CONVERSATIONS[name], tokenize=False, **options,
            **variables,
        )  # fmt: skip
        ours_now = outcome(chat.render, CONVERSATIONS[name], **options, variables=variables)
        assert ours_now == wanted


def test_shipped_models_write_calls_as_comments_and_code():
    chat = ours(template_of("etude"))
    tool = {"type": "function", "function": {"name": "weather", "description": "Two\nlines"}}
    asked = chat.render([HELLO | {"content": "Warm?\nThere."}, CALL, RESULT], tools=[tool])
    assert asked == (
        "# The functions that may be called:\n# <tools>\n"
        '# {"type": "function", "function": {"name": "weather", "description": "Two\\nlines"}}\n'
        "# </tools>\n# A call gives a name and arguments:\n# <tool_call>\n"
        '# {"name": "function", "arguments": {"parameter": "value"}}\n# </tool_call>\n'
        "# Warm?\n# There.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2.5, true]}}\n'
        "</tool_call>\n"
        '# <tool_response>\n# {"sky": "<clear>"}\n# </tool_response>\n'
    )
    assert chat.render([HELLO | {"content": "a\nb"}, ANSWER | {"content": "x = 1"}]) == (
        "# a\n# b\nx = 1\n"
    )


def test_shipped_models_share_one_template():
    root = Path(__file__).parents[3]
    source = (root / "training" / "templates" / "chat_template.jinja").read_bytes()
    for name in SHIPPED:
        assert (shipped_folder(name) / "chat_template.jinja").read_bytes() == source


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_conversations_are_not_refused(family):
    """Keeps the comparison above from comparing refusals only."""
    chat = ours(template_of(family))
    for name in ("one message", "with system", "answered", "turns"):
        messages = [message | {"content": message["content"]} for message in CONVERSATIONS[name]]
        assert "Hello <b>you</b> & 'me'" in chat.render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(self=1, n=0) %}{% set ns.n = 2 %}{{ ns.self }}{{ ns.n }}",
        "{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 3) | tojson(2) }}",
        "{{ messages | tojson(ensure_ascii=True, indent=2, separators=(',', ' : ')) }}",
        "{{ documents is defined }}{{ documents is none }}{{ xml is defined }}{{ tools is none }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ image_token }}",
        "  {% if true %}\n    x\n  {% endif %}\n\ny\n",
        "{% generation %}\n  {{ messages[0].content }}\n{% endgeneration %}",
        "{% for c in 'abc' %}{% if c == 'b' %}{% continue %}{% endif %}{{ c }}{% endfor %}",
        "{{ strftime_now('%Y-%m-%d %H:%M') }}",
        "{{ messages[0].__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_hidden=1) %}",
        "{{ messages[7].content.x }}",
        "{{ undefined_name.field }}",
        "{{ 1 / 0 }}",
        "{{ xml | tojson }}",
        "{{ raise_exception('no') }}",
    ],
)
@pytest.mark.usefixtures("frozen_clock")
def test_features_equal_transformers(template, byte_level):
    them = PreTrainedTokenizerFast(tokenizer_object=byte_level, chat_template=template, **TOKENS)
    try:
        wanted = them.apply_chat_template([HELLO], tokenize=False)
    except (theirs_module.jinja2.TemplateError, TypeError, ZeroDivisionError):
        wanted = "refused"
    assert outcome(ours(template).render, [HELLO], add_generation_prompt=False) == wanted


def test_the_template_says_why_it_refuses():
    chat = ours(template_of("laneformer"))
    with pytest.raises(RequestError, match="refuses this conversation: Turns go user, assistant"):
        chat.render([HELLO, HELLO])


def test_a_failing_template_is_told_from_a_refusal():
    with pytest.raises(RequestError, match=r"\(chat template\) fails on this conversation: .*name"):
        ours("{{ name.field }}").render([HELLO])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("Hello", "messages is a str"),
        ([], "the conversation is empty"),
        ([HELLO, "Hello"], r"messages\[1\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([HELLO, {"role": 3, "content": "x"}], r"messages\[1\] has the role 3"),
        ([{"role": "", "content": "x"}], r"messages\[0\] has the role ''"),
        ([HELLO, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content is \['x'\]"),
        ([CALL | {"tool_calls": "x"}], r"messages\[0\]\.tool_calls is 'x'"),
        ([HELLO | {"extra": {"deep": [b"x"]}}], r"messages\[0\]\.extra\.deep\[0\] is b'x'"),
        ([HELLO | {"extra": float("nan")}], r"messages\[0\]\.extra is nan"),
        ([HELLO | {7: "x"}], r"messages\[0\] has the key 7"),
    ],
)
def test_malformed_messages_are_refused_by_index(messages, sentence):
    with pytest.raises(RequestError, match=sentence):
        ours("{{ messages }}").render(messages)


@pytest.mark.parametrize(
    ("tools", "sentence"), [({}, "tools is a dict"), ([TOOLS[0], len], r"tools\[1\] is a builtin")]
)
def test_malformed_tools_are_refused(tools, sentence):
    with pytest.raises(RequestError, match=sentence):
        ours("{{ tools }}").render([HELLO], tools=tools)


def test_messages_stay_as_they_were():
    messages = [json.loads(json.dumps(HELLO)), {"role": "assistant", "content": "So"}]
    before = json.loads(json.dumps(messages))
    assert ours(template_of("qwen2")).render(messages, continue_final_message=True).endswith("So")
    assert messages == before


def test_a_prompt_ends_in_one_way_only():
    with pytest.raises(RequestError, match="are both true"):
        ours("x").render([HELLO], continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "final", "sentence"),
    [
        ("{{ messages[0].role }}", HELLO, "leaves out or rewrites the final message"),
        ("{{ messages[0].content | upper }}", HELLO, "leaves out or rewrites the final message"),
        ("{{ messages[0].role }}", CALL, r"messages\[0\] has no text to continue"),
    ],
)
def test_what_cannot_be_continued_is_refused(template, final, sentence):
    with pytest.raises(RequestError, match=sentence):
        ours(template).render([final], continue_final_message=True)


def test_templates_in_tokenizer_config_may_have_names(folder):
    named = [
        {"name": "default", "template": "plain{{ bos_token }}"},
        {"name": "tool_use", "template": "with tools"},
        {"name": "rag", "template": "with documents"},
    ]
    config = {"bos_token": {"content": "<s>"}, "chat_template": named}
    chat = ChatTemplate.from_folder(folder(tokenizer_config=config))
    assert chat.names == ("default", "tool_use", "rag")
    assert chat.render([HELLO]) == "plain<s>"
    assert chat.render([HELLO], tools=TOOLS) == "with tools"
    assert chat.render([HELLO], template="rag") == "with documents"
    with pytest.raises(RequestError, match=r"no chat template 'other' \(it has: default, tool_use"):
        chat.render([HELLO], template="other")


def test_template_files_go_before_tokenizer_config(folder):
    path = folder(tokenizer_config={"chat_template": "from config"})
    assert ChatTemplate.from_folder(path).render([HELLO]) == "from config"
    (path / "chat_template.jinja").write_text("from file", encoding="utf-8")
    extra = path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("from folder", encoding="utf-8")
    chat = ChatTemplate.from_folder(path)
    assert chat.render([HELLO]) == "from file"
    assert chat.render([HELLO], tools=TOOLS) == "from folder"


def test_a_model_without_template_is_told_to_complete(folder):
    with pytest.raises(TokenizerError, match="has no chat template") as caught:
        ChatTemplate.from_folder(folder(tokenizer_config={}))
    assert "plain completion" in caught.value.hint


@pytest.mark.parametrize("value", [5, [{"name": "default"}], ["x"]])
def test_a_malformed_template_field_is_refused(folder, value):
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: field 'chat_template'"):
        ChatTemplate.from_folder(folder(tokenizer_config={"chat_template": value}))


def test_a_syntax_error_names_template_and_line(folder):
    path = folder(tokenizer_config={})
    (path / "chat_template.jinja").write_text("x\n{% if %}", encoding="utf-8")
    with pytest.raises(
        TokenizerError, match=r"chat template 'default' has a syntax error in line 2"
    ):
        ChatTemplate.from_folder(path)


def test_a_rendered_prompt_gets_no_second_bos(byte_fallback, folder):
    config = {"bos_token": "<s>", "chat_template": template_of("laneformer"), "eos_token": "</s>"}
    path = folder(byte_fallback, tokenizer_config=config)
    tokenizer = Tokenizer.from_folder(path)
    prompt = ChatTemplate.from_folder(path).render([HELLO])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id
