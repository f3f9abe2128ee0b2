"""Calls that a grammar forces are calls that the readers read, whatever tokens a model chooses."""

import ast
import json
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soloist.errors import BadGrammar
from soloist.model.folder import shipped_folder
from soloist.text import Tokenizer
from soloist.text.answers import answer_grammar, json_form
from soloist.text.call_grammar import Calls, Function
from soloist.text.grammar import Grammars
from soloist.text.parts import CALL, CALLS, END_CALL, END_THINK, THINK, PartFormat, PartReader
from unit.text.schemas import fits, schemas
from unit.text.walks import text_of, walk

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "kind": {"enum": ["rain", "wind\n"]},
        "days": {"$ref": "#/$defs/days"},
        "exact": {"type": "boolean"},
    },
    "required": ["kind", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "array", "items": {"enum": [1, 2.5]}, "maxItems": 2}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = (Function("get.weather", WEATHER), Function("now", NOTHING))
STYLES = [
    ("tagged", False),
    ("bare", False),
    ("listed", False),
    ("listed", True),
    ("marked", False),
    ("values", False),
    ("python", False),
]
NOT_TEXT = frozenset({("get.weather", "days"), ("get.weather", "exact")})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(shipped_folder("etude"))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def read(style, text, *, thinks=False, prompt=""):
    reader = PartReader(PartFormat(style, thinks, NOT_TEXT), prompt)
    parts = reader.push(text) + reader.finish()
    assert not reader.warning, (reader.warning, text)
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return calls, "".join(p.text for p in parts if p.kind == "content")


def check(calls) -> None:
    for name, arguments in calls:
        value = json.loads(arguments)
        schema = next(f.parameters for f in FUNCTIONS if f.name == name)
        assert set(value) <= set(schema["properties"])
        assert set(schema.get("required", ())) <= set(value)
        assert value.get("kind", "rain") in ("rain", "wind\n")
        assert all(day in (1, 2.5) for day in value.get("days", ()))


@pytest.mark.parametrize(("style", "names_arguments"), STYLES)
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_are_read(tokenizer, grammars, style, names_arguments, several) -> None:
    calls = Calls(style, FUNCTIONS, True, several, names_arguments)
    grammar, counts = grammars.compile(answer_grammar(None, calls)), []
    for seed in range(30):
        ids, is_whole = walk(grammar, seed, most=400)
        if is_whole:
            found, content = read(style, text_of(tokenizer, ids))
            assert content == ""
            assert found
            check(found)
            counts.append(len(found))
    assert len(counts) > 10
    assert (max(counts) > 1) == several


@pytest.mark.parametrize(("style", "names_arguments"), STYLES)
def test_marks_that_are_special_tokens(tokenizer, grammars, style, names_arguments) -> None:
    special = {CALL: 8, END_CALL: 9, CALLS: 10, "[ARGS]": 11, THINK: 12, END_THINK: 13}
    special["<|tool_call|>"] = 14
    calls = Calls(style, FUNCTIONS, True, False, names_arguments)
    grammar = grammars.compile(answer_grammar(None, calls, "begun", special))
    for seed in range(200):
        ids, is_whole = walk(grammar, seed, most=900)
        if is_whole:
            break
    assert is_whole
    assert ids.count(13) == 1
    by_id = {i: mark for mark, i in special.items()}
    text = "".join(by_id.get(i) or text_of(tokenizer, [i]) for i in ids[ids.index(13) + 1 :])
    found, content = read(style, text)
    assert not content.strip()
    check(found)


CALLED = {
    "tagged": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "bare": '{"name": "now", "parameters": {}}',
    "listed": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
    "marked": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    "values": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "python": "[now()]",
}


def accepts(tokenizer, grammar, text) -> bool:
    matcher = grammar.start()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher._matcher.try_consume_tokens(ids) == len(ids) and matcher.may_end


@pytest.mark.parametrize("style", CALLED)
def test_text_is_free_where_calls_are_not_forced(tokenizer, grammars, style) -> None:
    one, called = "Well, < {x} [y]. ", CALLED[style]
    for several in (False, True):
        calls = Calls(style, FUNCTIONS, False, several)
        grammar = grammars.compile(answer_grammar(None, calls))

        def takes(text, grammar=grammar) -> bool:
            return accepts(tokenizer, grammar, text)

        assert takes(one)
        assert takes("")
        assert takes(called)
        assert not takes(called.replace("now", "then"))
        assert not takes(called.replace("now", "get.weather")), "it lacks what is required"
        twice = {"bare": f"{called}; {called}", "python": "[now(), now()]"}
        assert takes(twice.get(style, f"{one}{called}\n{called}")) == several
        if style not in twice:
            assert takes(one + called + one)
            assert not takes(one + called.replace("now", "then") + one)


@pytest.mark.parametrize("style", ["tagged", "listed", "values"])
def test_calls_may_come_instead_of_a_form(tokenizer, grammars, style) -> None:
    form = json_form({"type": "array", "items": {"const": 1}})
    source = answer_grammar(form, Calls(style, FUNCTIONS, False, False))
    grammar = grammars.compile(source)
    assert accepts(tokenizer, grammar, "[1, 1]")
    assert accepts(tokenizer, grammar, CALLED[style])
    assert not accepts(tokenizer, grammar, "text")


def test_reasoning_comes_first(tokenizer, grammars) -> None:
    form = json_form({"const": 1})
    begun = grammars.compile(answer_grammar(form, None, "begun"))
    perhaps = grammars.compile(answer_grammar(form, None, "perhaps"))
    assert accepts(tokenizer, begun, "Hm.\n\n</think>\n\n1")
    assert not accepts(tokenizer, begun, "1")
    assert not accepts(tokenizer, begun, "</think>2")
    assert accepts(tokenizer, perhaps, "<think>\n1, 2?</think>1")
    assert accepts(tokenizer, perhaps, "1")
    assert not accepts(tokenizer, perhaps, "<think>1")


@pytest.mark.parametrize("special", [{}, {"[THINK]": 12, "[/THINK]": 13}])
def test_reasoning_between_other_marks(tokenizer, grammars, special) -> None:
    marks = ("[THINK]", "[/THINK]")
    source = answer_grammar(json_form({"const": 1}), None, "perhaps", special, marks)
    grammar = grammars.compile(source)

    def takes(*pieces: str) -> bool:
        matcher, ids = grammar.start(), []
        for piece in pieces:
            encoded = tokenizer.encode(piece, add_special_tokens=False)
            ids += [special[piece]] if piece in special else encoded
        return matcher._matcher.try_consume_tokens(ids) == len(ids) and matcher.may_end

    assert takes("1")
    assert takes("[THINK]", "Hm </think> 2?", "[/THINK]", "1")
    assert not takes("[THINK]", "1")
    assert not takes("<think>", "Hm", "</think>", "1")


@pytest.mark.parametrize(
    "value", [{"type": "string", "pattern": "a+"}, {"type": "string", "maxLength": 3}]
)
def test_texts_between_tags_cannot_keep_to_patterns(value) -> None:
    tool = Function("f", {"type": "object", "properties": {"x": value}})
    with pytest.raises(BadGrammar, match="texts between tags"):
        answer_grammar(None, Calls("values", (tool,), True, False))
    answer_grammar(None, Calls("tagged", (tool,), True, False))


# Python -------------------------------------------------------------------------------------------


def python_of(properties, required=(), **more) -> Calls:
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return Calls("python", (Function("f", schema),), True, False)


def arguments_of(text: str) -> dict:
    ((_, arguments),), content = read("python", text)
    assert not content
    return json.loads(arguments)


TEXTS = [
    ("'it\\'s \\\\ \\n \\x00 é 🙂'", "it's \\ \n \x00 é 🙂"), ('"it\'s"', "it's"), ("''", ""),
    ("'a\nb'", None), ("'a\\u0041'", None), ("'a\\'", None), ("'a\x00'", None), ("b'a'", None),
    ("'a' 'b'", None), ("f'a'", None),
]  # fmt: skip


@pytest.mark.parametrize(("literal", "value"), TEXTS)
def test_texts_of_python_calls(tokenizer, grammars, literal, value) -> None:
    grammar = grammars.compile(answer_grammar(None, python_of({"x": {"type": "string"}}, ["x"])))
    text = f"[f(x={literal})]"
    assert accepts(tokenizer, grammar, text) == (value is not None)
    if value is not None:
        assert arguments_of(text) == {"x": value}


LITERALS = [
    ({"type": "integer"}, ["0", "-7", "1234567890123456789"], ["01", "1.5", "True", "'1'", "+1"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "-3"]),
    ({"type": "number"}, ["-1.5", "2e10", "0"], ["1e400", "nan", "inf", ".5", "1_0"]),
    ({"type": "boolean"}, ["True", "False"], ["true", "1"]),
    ({"type": "null"}, ["None"], ["null", "0"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["None", "'ab'", "'\\n\\''"], ["'abc'", "1"]),
    ({"type": "string", "minLength": 2}, ["'ab'", '"a\\n"'], ["'a'", "''"]),
    ({"enum": ["it's", "b", 2, None, [1]]}, ['"it\'s"', "'b'", "2", "None", "[1]"], ["'c'", "1"]),
    ({"enum": ["b", 2], "type": "string"}, ["'b'"], ["2"]),
    ({"const": {"a": [True]}}, ["{'a': [True]}"], ["{'a': [1]}", "{}"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "None"], ["'1'"]),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["'1'", "None"], ["1"]),
    ({"allOf": [{"type": "boolean"}], "title": "t"}, ["True"], ["1"]),
    (
        {"type": "array", "items": {"type": "integer"}},
        ["[]", "[1]", "[1, 2, 3]"], ["[1,2]", "['a']", "[1, ]"],
    ),
    ({"type": "array", "maxItems": 1}, ["[]", "['a']"], ["[1, 2]"]),
    ({"type": "array", "minItems": 1, "maxItems": 1}, ["[1]"], ["[]", "[1, 2]"]),
    (
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        ["[None]", "[None, None]"], ["[]", "[None, None, None]"],
    ),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({}, ["[1, {'a': (1)}]".replace("(1)", "None")], ["[1", "f()"]),
    (
        {
            "type": "object", "required": ["b"],
            "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"const": "x"}},
        },
        ["{'a': 1, 'b': None}", "{'b': None}", "{'b': None, 'c': 'x'}"],
        ["{}", "{'a': 1}", "{'b': None, 'a': 1}", "{'b': None, }", "{'b': None, 'd': 1}"],
    ),
    ({"type": "object", "additionalProperties": False}, ["{}"], ["{'a': 1}"]),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ["{}", "{'a': 1}", "{'a': 1, \"b\": 2}"], ["{'a': 'x'}", "{1: 2}"],
    ),
    (
        {"$ref": "#/$defs/tree"},
        ["{'next': None}", "{'next': {'next': None}}"], ["{}", "{'next': {}}", "None"],
    ),
]  # fmt: skip
TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
    "required": ["next"],
}


@pytest.mark.parametrize(("schema", "right", "wrong"), LITERALS)
def test_literals_of_python_calls(tokenizer, grammars, schema, right, wrong) -> None:
    calls = python_of({"x": schema}, ["x"], **{"$defs": {"tree": TREE}})
    grammar = grammars.compile(answer_grammar(None, calls))
    for literal in right:
        text = f"[f(x={literal})]"
        assert accepts(tokenizer, grammar, text), text
        assert arguments_of(text) == {"x": ast.literal_eval(literal)}
    for literal in wrong:
        assert not accepts(tokenizer, grammar, f"[f(x={literal})]"), literal


@pytest.mark.parametrize("required", [(), ("b",), ("a", "d"), ("a", "b", "c", "d")])
def test_arguments_of_python_calls_come_in_order(tokenizer, grammars, required) -> None:
    calls = python_of({key: {"const": 1} for key in "abcd"}, required)
    grammar = grammars.compile(answer_grammar(None, calls))
    for count in range(5):
        for keys in permutations("abcd", count):
            text = f"[f({', '.join(f'{key}=1' for key in keys)})]"
            is_right = list(keys) == sorted(keys) and set(required) <= set(keys)
            assert accepts(tokenizer, grammar, text) == is_right, text


UNSAID = [
    ({"type": "string", "pattern": "a"}, "pattern of 'x'"),
    ({"type": "string", "format": "date"}, "format of 'x'"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems of 'x'"),
    ({"type": "array", "items": {"not": {}}}, "not of an item of 'x'"),
    ({"type": "array", "minItems": "1"}, "minItems of 'x' is no whole number"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems is above maxItems"),
    ({"type": "object", "minProperties": 1}, "minProperties of 'x'"),
    ({"type": "object", "properties": []}, "properties of 'x' is no object"),
    ({"type": "object", "required": ["a"]}, "'a' of 'x' is required, but not in properties"),
    ({"type": "date"}, "none of string"),
    ({"type": []}, "none of string"),
    ({"enum": []}, "allows no value"),
    ({"enum": ["a"], "type": "integer"}, "allows no value"),
    ({"anyOf": []}, "no list of schemas"),
    ({"anyOf": [{}], "type": "string"}, "type of 'x'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
    ({"oneOf": [{"enum": ["a"]}, {"enum": ["b"]}]}, "may overlap"),
    ({"allOf": [{}, {}]}, "allOf of 'x'"),
    ({"$ref": "#/$defs/none"}, "there is no"),
    ({"$ref": "https://x"}, "does not begin"),
    ({"$ref": []}, "does not begin"),
    ({"type": [[]]}, "none of string"),
    ({"type": None}, "none of string"),
    ({"enum": [1], "type": {}}, "none of string"),
    ({"enum": 1}, "enum of 'x' is no list"),
    ({"type": "string", "maxLength": 1.5}, "maxLength of 'x' is no whole number"),
    ({"if": {}}, "if of 'x'"),
    (False, "no object"),
]


@pytest.mark.parametrize(("schema", "told"), UNSAID)
def test_what_python_calls_cannot_keep_to_is_refused(schema, told) -> None:
    with pytest.raises(BadGrammar, match=told):
        answer_grammar(None, python_of({"x": schema}))


@pytest.mark.parametrize(
    ("name", "schema", "told"),
    [
        ("get-weather", NOTHING, "'get-weather' is no Python identifier"),
        ("f.class", NOTHING, "'f.class' is no Python identifier"),
        ("f", {"type": "object", "properties": {"a b": {}}}, "'a b' is no Python identifier"),
        ("f", {"type": "object", "properties": {"in": {}}}, "'in' is no Python identifier"),
        ("f", {"type": "object", "required": ["a"]}, "'a' of the arguments is required"),
        ("f", {"type": "array"}, "are an object"),
        ("f", {"type": "object", "if": {}}, "if of the arguments"),
        ("f", {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}, "of the arguments"),
    ],
)
def test_functions_that_python_cannot_call_are_refused(name, schema, told) -> None:
    with pytest.raises(BadGrammar, match=told):
        answer_grammar(None, Calls("python", (Function(name, schema),), True, False))


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(schemas(), st.integers(0, 999))
def test_arguments_of_python_calls_keep_to_any_schema(tokenizer, grammars, schema, seed) -> None:
    if "'pattern': '" in str(schema):
        return  # refused, as shown above
    grammar = grammars.compile(answer_grammar(None, python_of({"x": schema}, ["x"])))
    ids, is_whole = walk(grammar, seed, most=600, at_once=bool(seed % 2))
    if is_whole:
        text = text_of(tokenizer, ids)
        assert fits(arguments_of(text)["x"], schema), text


# Random schemas -----------------------------------------------------------------------------------


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(schemas(), st.integers(0, 999))
def test_what_a_schema_allows_is_what_it_describes(tokenizer, grammars, schema, seed) -> None:
    grammar = grammars.compile(answer_grammar(json_form(schema)))
    ids, is_whole = walk(grammar, seed, most=600, at_once=bool(seed % 2))
    text = text_of(tokenizer, ids)
    if is_whole:
        assert fits(json.loads(text), schema), text
