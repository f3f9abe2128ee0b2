"""Reasoning, content and tool calls, however the text is cut; and no text is lost."""

import codecs
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.text.parts import Part, PartFormat, PartReader, format_of

TAGGED, BARE = PartFormat("tagged", thinks=True), PartFormat("bare", thinks=False)
PLAIN = PartFormat(None, thinks=False)
LISTED = PartFormat("listed", thinks=False)
MARKED = PartFormat("marked", thinks=False)
PYTHON = PartFormat("python", thinks=False)
VALUES = PartFormat(
    "values", thinks=True, json_parameters=frozenset({("f", "n"), ("f", "rows"), ("f", "on")})
)
MAGISTRAL = PartFormat("listed", thinks=True, think="[THINK]", end_think="[/THINK]")
STYLES = [TAGGED, BARE, PLAIN, LISTED, PYTHON, VALUES, MAGISTRAL]


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
CALL_V = (
    '<tool_call>\n<function=f>\n<parameter=code>\ndef g(x):\n    return "é" < 3\n\n</parameter>\n'
    '<parameter=n>\n-1.5\n</parameter>\n<parameter=rows>\n[1, {"a": null}]\n</parameter>\n'
    "<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
V = [
    Part("call", "f", 0),
    Part(
        "arguments",
        '{"code": "def g(x):\\n    return \\"é\\" < 3\\n", "n": -1.5, "rows": [1, {"a": null}], '
        '"on": true}',
        0,
    ),
]
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
    "magistral": (
        MAGISTRAL, "", "[THINK]Hm, [T] or </think>?\n[/THINK]\n\nSo [THINK] is a mark. [/THI",
        [
            Part("reasoning", "Hm, [T] or </think>?"),
            Part("content", "So [THINK] is a mark. [/THI"),
        ],
    ),
    "magistral-in-prompt": (
        MAGISTRAL, "[/INST][THINK]", "Hm.[/THINK]So.",
        [Part("reasoning", "Hm."), Part("content", "So.")],
    ),
    "magistral-behind-the-mark": (MAGISTRAL, "[THINK]Hm.[/THINK]", "So.", [Part("content", "So.")]),
    "magistral-without-reasoning": (
        MAGISTRAL, "", "<think>x</think>", [Part("content", "<think>x</think>")],
    ),
    "magistral-call": (
        MAGISTRAL, "", '[THINK][TOOL_CALLS]? Yes.[/THINK]Well.[TOOL_CALLS]f[ARGS]{"a": "[/THINK]"}',
        [
            Part("reasoning", "[TOOL_CALLS]? Yes."), Part("content", "Well."), Part("call", "f", 0),
            Part("arguments", '{"a": "[/THINK]"}', 0),
        ],
    ),
    "magistral-thought-without-end": (MAGISTRAL, "", "[THINK]and", [Part("reasoning", "and")]),
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
    "list": (
        LISTED, "", 'So.\n[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "abcdefghi"}, '
        '{"name": "g", "arguments": {}}]',
        [
            Part("content", "So."), Part("call", "f", 0), Part("arguments", '{"a": "]"}', 0),
            Part("call", "g", 1), Part("arguments", "{}", 1),
        ],
    ),
    "marked-list": (
        MARKED, "", 'So.\n<|tool_call|>[{"name": "f", "arguments": {"a": "]"}}, '
        '{"name": "g", "arguments": {}}]',
        [
            Part("content", "So."), Part("call", "f", 0), Part("arguments", '{"a": "]"}', 0),
            Part("call", "g", 1), Part("arguments", "{}", 1),
        ],
    ),
    "list-and-text": (
        LISTED, "", '[TOOL_CALLS][{"name": "f", "arguments": {}}] Done [TOOL', [
            Part("call", "f", 0), Part("arguments", "{}", 0), Part("content", "Done [TOOL"),
        ],
    ),
    "listed-object": (
        LISTED, "", '[TOOL_CALLS]{"name": "f", "arguments": {"é": [1]}}',
        [Part("call", "f", 0), Part("arguments", '{"é": [1]}', 0)],
    ),
    "names-before-arguments": (
        LISTED, "", 'Hm[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        [
            Part("content", "Hm"), Part("call", "f", 0), Part("arguments", '{"a": {"b": "}"}}', 0),
            Part("call", "g", 1), Part("arguments", "{}", 1),
        ],
    ),
    "name-and-arguments": (
        LISTED, "", '[TOOL_CALLS] f {"a": 1}',
        [Part("call", "f", 0), Part("arguments", '{"a": 1}', 0)],
    ),
    "values": (VALUES, "", "<think>\nhm\n</think>\n\nWell\n" + CALL_V, [
        Part("reasoning", "hm"), Part("content", "Well"), *V,
    ]),
    "values-of-two-calls": (
        VALUES, "", CALL_V + "\n<tool_call>\n<function=g>\n</function>\n</tool_call>\nDone",
        [*V, Part("call", "g", 1), Part("arguments", "{}", 1), Part("content", "Done")],
    ),
    "values-without-outer-tags": (
        VALUES, "", "<function=f><parameter=n>x</parameter><parameter=s></parameter></function>",
        [Part("call", "f", 0), Part("arguments", '{"n": "x", "s": ""}', 0)],
    ),
    "values-that-look-like-tags": (
        VALUES, "", "<tool_call><function=f><parameter=s>\n</para\n</parameter </parameter>"
        "</function></tool_call>",
        [Part("call", "f", 0), Part("arguments", '{"s": "</para\\n</parameter "}', 0)],
    ),
    "python": (
        PYTHON, "", "[f(a='it\\'s (é)', b=[1, {'x': None}], c=-2.5), m.g(),h( d = True, )]",
        [
            Part("call", "f", 0),
            Part("arguments", '{"a": "it\'s (é)", "b": [1, {"x": null}], "c": -2.5}', 0),
            Part("call", "m.g", 1), Part("arguments", "{}", 1),
            Part("call", "h", 2), Part("arguments", '{"d": true}', 2),
        ],
    ),
    "python-content": (PYTHON, "", "see [f(a=1)] ", [Part("content", "see [f(a=1)] ")]),
    "white-space-is-not-held-behind-content": (
        BARE, "", "a \n\n b  ", [Part("content", "a \n\n b  ")],
    ),
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
    raw = text.encode()
    for at in range(1, len(raw)):
        decoder = codecs.getincrementaldecoder("utf-8")()
        pieces = [decoder.decode(raw[:at]), decoder.decode(raw[at:])]
        assert read(style, pieces, prompt)[0] == wanted


BROKEN = [
    (TAGGED, "<tool_call>f(1)</tool_call>"),
    (TAGGED, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (TAGGED, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": 1'),
    (TAGGED, '<tool_call>{name: "f"}</tool_call>'),
    (TAGGED, "<tool_call>"),
    (BARE, '{"a": 1}'),
    (BARE, "{not json"),
    (LISTED, "[TOOL_CALLS]"),
    (MARKED, "<|tool_call|> I call f"),
    (LISTED, "[TOOL_CALLS] []"),
    (LISTED, "[TOOL_CALLS] [1]"),
    (LISTED, '[TOOL_CALLS] [{"nam'),
    (LISTED, "[TOOL_CALLS] call the function, please"),
    (LISTED, "[TOOL_CALLS]the [function] {"),
    (LISTED, "[TOOL_CALLS]" + 300 * "x"),
    (VALUES, "<tool_call>f(1)</tool_call>"),
    (VALUES, "<function=>"),
    (VALUES, "<function=f(x)\n"),
    (VALUES, "<tool_call>\n<function=f>x"),
    (VALUES, "<function=f><parameter=a>1</function>"),
    (PYTHON, "[1, 2]"),
    (PYTHON, "[f(1)]"),
    (PYTHON, "[f(a=b)]"),
    (PYTHON, "[f(a={1})]"),
    (PYTHON, "[a link](x)"),
    (PYTHON, "[f(a='x)]"),
]


@pytest.mark.parametrize(("style", "text"), BROKEN)
def test_what_is_no_call_is_text_with_a_warning(style: PartFormat, text: str) -> None:
    parts, warning = read(style, [text])
    assert warning
    assert text in "".join(p.text for p in parts if p.kind == "content")
    assert read(style, list(text)) == (parts, warning)


def test_of_several_calls_only_the_broken_one_is_text() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"x'
    parts, warning = read(LISTED, [text])
    assert parts == [
        Part("call", "f", 0), Part("arguments", "{}", 0), Part("content", ', {"x'),
    ]  # fmt: skip
    assert warning


def test_arguments_are_told_as_they_come() -> None:
    reader = PartReader(TAGGED)
    assert reader.push('<tool_call>{"name": "f", "argu') == [Part("call", "f", 0)]
    assert reader.push('ments": {"code": "abc') == [Part("arguments", '{"code": "abc', 0)]
    assert reader.push("def") == [Part("arguments", "def", 0)]
    reader = PartReader(VALUES)
    assert reader.push("<function=f>\n<parameter=co") == [Part("call", "f", 0)]
    assert reader.push("de>\nabc\n") == [Part("arguments", '{"code": "abc', 0)]
    assert reader.push("def</") == [Part("arguments", "\\ndef", 0)]
    reader = PartReader(LISTED)
    assert reader.push('[TOOL_CALLS]f[ARGS]{"code": "ab') == [
        Part("call", "f", 0), Part("arguments", '{"code": "ab', 0),
    ]  # fmt: skip
    reader = PartReader(PYTHON)
    assert reader.push("[f(a=1, b") == [Part("call", "f", 0), Part("arguments", '{"a": 1', 0)]


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"',
             ', "arguments": ', "{", "}", '"a"', ": 1", "x", " ", "\n", "<", "<tool", ";",
             "[TOOL_CALLS]", "[ARGS]", "<function=", "f", ">", "<parameter=", "</parameter>",
             "</function>", "[", "[THINK]", "[/THINK]", "[TH", "f(", "a=", "'", ")", "]", ","]
        ),
        max_size=14,
    ),
    st.sampled_from(STYLES),
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
        marks = ("<tool_call>", "</tool_call>", style.think, style.end_think, " ", "\n")
        for mark in marks:
            kept, text = kept.replace(mark, ""), text.replace(mark, "")
        assert kept == text
    if not warning:
        for arguments in (p.text for p in parts if p.kind == "arguments"):
            assert arguments[0] != "{" or arguments.count("{") == arguments.count("}")


def test_formats_are_read_from_templates() -> None:
    assert format_of('… <tool_call>\\n{"name": <function-name>} … </think>') == TAGGED
    assert format_of("<tool_call>\n<function=name>") == PLAIN
    coder = "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>"
    assert format_of(coder) == PartFormat("values", thinks=False)
    llama = 'Respond in the format {"name": …, "parameters": dictionary} <|python_tag|>'
    assert format_of(llama) == BARE
    assert format_of("put it as [func_name1(params_name1=params_value1), func_name2()]") == PYTHON
    mistral = "{{- '[TOOL_CALLS] [' }} … {{ tool_call.id }} … [/AVAILABLE_TOOLS]"
    assert format_of(mistral) == LISTED
    assert format_of("… respond only with <|tool_call|> followed by a JSON list …") == MARKED
    magistral = "[/SYSTEM_PROMPT] {{- '[THINK]' + block['thinking'] + '[/THINK]' }} [TOOL_CALLS]"
    assert format_of(magistral) == MAGISTRAL
    assert format_of("{{- '[THINK]' + block['thinking'] }}").calls is None
    assert format_of("{{ messages }}") == PLAIN
    assert json.loads(F[1].text) == {"a": '}"', "b": [1, {"c": 2}]}
    assert json.loads(V[1].text)["code"] == 'def g(x):\n    return "é" < 3\n'


def test_marks_are_all_that_must_be_shown() -> None:
    assert set(LISTED.marks) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert set(MARKED.marks) == {"<|tool_call|>"}
    assert set(TAGGED.marks) == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert set(MAGISTRAL.marks) == {*LISTED.marks, "[THINK]", "[/THINK]"}
    assert PLAIN.marks == BARE.marks == ()
