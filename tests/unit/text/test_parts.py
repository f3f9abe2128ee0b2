"""Reasoning, content and tool calls, however the text is cut; and no text is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.text.parts import Part, PartFormat, PartReader, format_of

TAGGED, BARE = PartFormat("tagged", thinks=True), PartFormat("bare", thinks=False)
PLAIN = PartFormat(None, thinks=False)


def read(style: PartFormat, pieces: list[str], prompt: str = "") -> tuple[list[Part], str]:
    reader, parts = PartReader(style, prompt), []
    for piece in pieces:
        parts += reader.push(piece)
    parts += reader.finish()
    joined: list[Part] = []
    for part in parts:
        assert part.text, "no empty pieces"
        last = joined[-1] if joined else None
        if last and part.kind != "call" and (last.kind, last.call) == (part.kind, part.call):
            joined[-1] = Part(part.kind, last.text + part.text, part.call)
        else:
            joined.append(part)
    return joined, reader.warning


CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": [1, {"c": 2}]}}\n</tool_call>'
F = [Part("call", "f", 0), Part("arguments", '{"a": "}\\"", "b": [1, {"c": 2}]}', 0)]

GOLDEN = {
    "content": (TAGGED, "", "def f(a < b): <tool", [Part("content", "def f(a < b): <tool")]),
    "indented": (TAGGED, "", "    x\n", [Part("content", "    x\n")]),
    "thought": (
        TAGGED, "", "<think>\nhm, <b>\n</think>\n\nSo.",
        [Part("reasoning", "hm, <b>"), Part("content", "So.")],
    ),
    "thought-in-prompt": (
        TAGGED, "…<think>\n", "hm\n</think>\n\nSo.",
        [Part("reasoning", "hm"), Part("content", "So.")],
    ),
    "thought-without-end": (TAGGED, "", "<think>and", [Part("reasoning", "and")]),
    "a-mark-later-is-text": (
        TAGGED, "", "write <think> here", [Part("content", "write <think> here")],
    ),
    "call": (TAGGED, "", CALL_F, F),
    "call-after-content": (TAGGED, "", "Wait.\n" + CALL_F, [Part("content", "Wait."), *F]),
    "all": (
        TAGGED, "", "<think>x</think>\nWell\n" + CALL_F + "\n"
        '<tool_call>{"arguments": {"n": 1.5e3}, "name": "g"}</tool_call>\nDone',
        [
            Part("reasoning", "x"), Part("content", "Well"), *F, Part("call", "g", 1),
            Part("arguments", '{"n": 1.5e3}', 1), Part("content", "Done"),
        ],
    ),
    "no-arguments": (
        TAGGED, "", '<tool_call>{"name": "now"}</tool_call>',
        [Part("call", "now", 0), Part("arguments", "{}", 0)],
    ),
    "arguments-as-text": (
        TAGGED, "", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [Part("call", "f", 0), Part("arguments", '{"a": 1}', 0)],
    ),
    "end-mark-missing": (
        TAGGED, "", '<tool_call>{"name": "f", "arguments": {}}',
        [Part("call", "f", 0), Part("arguments", "{}", 0)],
    ),
    "further-fields": (
        TAGGED, "",
        '<tool_call>{"id": 3, "type": "function", "name": "f", "arguments": {"x": null}}'
        "</tool_call>",
        [Part("call", "f", 0), Part("arguments", '{"x": null}', 0)],
    ),
    "bare": (
        BARE, "", '{"name": "f", "parameters": {"x": "y"}}',
        [Part("call", "f", 0), Part("arguments", '{"x": "y"}', 0)],
    ),
    "two-bare": (
        BARE, "", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
        [
            Part("call", "f", 0), Part("arguments", "{}", 0),
            Part("call", "g", 1), Part("arguments", '{"a": 1}', 1),
        ],
    ),
    "bare-content": (BARE, "", "a {x}", [Part("content", "a {x}")]),
    "plain": (PLAIN, "", "<think>" + CALL_F + "\n", [Part("content", "<think>" + CALL_F + "\n")]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_texts_cut_at_every_place(name: str) -> None:
    style, prompt, text, wanted = GOLDEN[name]
    whole, warning = read(style, [text], prompt)
    assert whole == wanted
    assert not warning
    for at in range(1, len(text)):
        assert read(style, [text[:at], text[at:]], prompt)[0] == wanted
    assert read(style, list(text), prompt)[0] == wanted


BROKEN = [
    (TAGGED, "<tool_call>f(1)</tool_call>"),
    (TAGGED, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (TAGGED, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": 1'),
    (TAGGED, '<tool_call>{name: "f"}</tool_call>'),
    (TAGGED, "<tool_call>"),
    (BARE, '{"a": 1}'),
    (BARE, "{not json"),
]


@pytest.mark.parametrize(("style", "text"), BROKEN)
def test_what_is_no_call_is_text_with_a_warning(style: PartFormat, text: str) -> None:
    parts, warning = read(style, [text])
    assert warning
    assert text in "".join(p.text for p in parts if p.kind == "content")
    assert read(style, list(text)) == (parts, warning)


def test_arguments_are_told_as_they_come() -> None:
    reader = PartReader(TAGGED)
    assert reader.push('<tool_call>{"name": "f", "argu') == [Part("call", "f", 0)]
    assert reader.push('ments": {"code": "abc') == [Part("arguments", '{"code": "abc', 0)]
    assert reader.push("def") == [Part("arguments", "def", 0)]


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"',
             ', "arguments": ', "{", "}", '"a"', ": 1", "x", " ", "\n", "<", "<tool", ";"]
        ),
        max_size=14,
    ),
    st.sampled_from([TAGGED, BARE, PLAIN]),
    st.data(),
)  # fmt: skip
def test_any_text_cut_anyhow_gives_the_same_and_loses_nothing(tokens, style, data) -> None:
    text = "".join(tokens)
    whole = read(style, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(style, pieces) == whole
    parts, warning = whole
    shown = "".join(p.text for p in parts if p.kind in ("content", "reasoning"))
    if not any(p.kind == "call" for p in parts):
        kept = shown
        for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>", " ", "\n"):
            kept, text = kept.replace(mark, ""), text.replace(mark, "")
        assert kept == text
    for part in parts:
        if part.kind == "arguments" and not warning and part.text[0] == "{":
            assert part.text.count("{") == part.text.count("}") or '"' in part.text


def test_formats_are_read_from_templates() -> None:
    assert format_of('… <tool_call>\\n{"name": <function-name>} … </think>') == TAGGED
    assert format_of("<tool_call><function=name>") == PLAIN
    llama = 'Respond in the format {"name": …, "parameters": dictionary} <|python_tag|>'
    assert format_of(llama) == BARE
    assert format_of("{{ messages }}") == PLAIN
    assert json.loads(F[1].text) == {"a": '}"', "b": [1, {"c": 2}]}
