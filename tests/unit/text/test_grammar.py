"""What grammars allow, on every kind of tokenizer, against the text that comes of it."""

import json
import re
import time

import numpy as np
import pytest

from soloist.errors import BadGrammar, GrammarFailed
from soloist.model.folder import find_model
from soloist.text import Tokenizer
from soloist.text.answers import (
    answer_grammar,
    choice_form,
    json_form,
    lark_form,
    object_form,
    regex_form,
)
from soloist.text.grammar import Grammars, Matcher
from unit.text.walks import ids_of, text_of, walk

SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer"},
        "kind": {"enum": ["日本", "b c", 4, None]},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "text": {"type": "string", "maxLength": 5},
    },
    "required": ["größe", "kind", "more", "text"],
    "additionalProperties": False,
}
CHOICES = ["café", 'say "hi"\n', "日本", " led by a space"]
PATTERN = r"[a-d]{2}/[0-9]+(\.[0-9]{2})?|Ende/\/ 😀"


@pytest.fixture(params=["byte_level", "byte_fallback", "unigram"])
def tokenizer(request, folder) -> Tokenizer:
    backend = request.getfixturevalue(request.param)
    return Tokenizer.from_folder(folder(backend))


def compiled(tokenizer: Tokenizer, form, vocab_size: int | None = None):
    grammars = Grammars(tokenizer, vocab_size or tokenizer.vocab_size)
    return grammars.compile(answer_grammar(form))


@pytest.mark.parametrize("at_once", [True, False])
def test_json(tokenizer, at_once) -> None:
    grammar, num_whole = compiled(tokenizer, json_form(SCHEMA)), 0
    for seed in range(20):
        ids, is_whole = walk(grammar, seed, at_once=at_once)
        num_whole += is_whole
        text = text_of(tokenizer, ids)
        assert text.startswith('{"größe": '[: len(text)])
        if not is_whole:
            continue
        value = json.loads(text)
        assert list(value) == ["größe", "kind", "more", "text"]
        assert isinstance(value["größe"], int)
        assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        assert len(value["more"]) <= 2
        assert len(value["text"]) <= 5
    assert num_whole > 10


def test_patterns_choices_and_lark(tokenizer) -> None:
    forms = {
        PATTERN: regex_form(PATTERN),
        "|".join(map(re.escape, CHOICES)): choice_form(CHOICES),
        r"\[(é, ){1,2}end\]": lark_form('start: "[" e ~ 1..2 "end]"\ne: "é, "\n'),
        "a\nb": regex_form("a\nb"),
    }
    for pattern, form in forms.items():
        grammar, found = compiled(tokenizer, form), set()
        for seed in range(25):
            ids, is_whole = walk(grammar, seed, most=400)
            text = text_of(tokenizer, ids)
            if not is_whole or (text.startswith("led") and tokenizer.decode(ids) == text):
                continue  # a tokenizer of texts that begin with a space takes it off
            assert re.fullmatch(pattern, text, re.DOTALL), text
            found.add(text)
        assert found


def test_what_is_forced_is_all_that_is_allowed(tokenizer) -> None:
    num_forced = 0

    def look(forced, allowed) -> None:
        nonlocal num_forced
        if forced:
            assert ids_of(allowed) == forced[:1]
            num_forced += len(forced)

    grammar = compiled(tokenizer, json_form(SCHEMA))
    for seed in range(6):
        walk(grammar, seed, look=look)
    assert num_forced > 20


def test_no_answer_holds_special_tokens_or_such_as_the_model_does_not_have(
    byte_level, folder
) -> None:
    path = folder(byte_level, generation_config={"eos_token_id": [2, 0]})
    tokenizer = Tokenizer.from_folder(path)
    for vocab_size in (tokenizer.vocab_size + 70, tokenizer.vocab_size, tokenizer.vocab_size - 50):
        seen: set[int] = set()

        def look(_, allowed, size=vocab_size, seen=seen) -> None:
            assert len(allowed) == -(-size // 32)
            seen.update(ids_of(allowed))

        for seed in range(10):
            grammar = compiled(tokenizer, regex_form("(.|\n){30}"), vocab_size)
            walk(grammar, seed, look=look)
        assert max(seen) < min(vocab_size, tokenizer.vocab_size)
        assert len(seen) > 200
        assert not seen & tokenizer.special_ids
        assert tokenizer.eos_ids == {0, 2}


def test_an_answer_may_end_where_it_has_its_form(tokenizer) -> None:
    matcher = compiled(tokenizer, regex_form("aa?")).start()
    (a,) = (i for i in ids_of(matcher.allowed()) if tokenizer.token_bytes(i) == b"a")
    assert not matcher.may_end
    matcher.take(a)
    assert matcher.may_end
    assert not matcher.is_complete
    assert a in ids_of(matcher.allowed())
    matcher.take(a)
    assert matcher.is_complete
    assert ids_of(matcher.allowed()) == matcher.forced() == []
    matcher.rollback(2)
    assert not matcher.may_end
    assert a in ids_of(matcher.allowed())
    with pytest.raises(GrammarFailed, match="after 0 tokens"):
        matcher.take(max(set(range(tokenizer.vocab_size)) - set(ids_of(matcher.allowed()))))


def test_answers_of_one_grammar_do_not_know_of_each_other(tokenizer) -> None:
    grammar = compiled(tokenizer, choice_form(["ab", "ba"]))
    first, second = grammar.start(), grammar.start()
    before = second.allowed()
    first.take(ids_of(before)[0])
    assert np.array_equal(second.allowed(), before)
    assert not np.array_equal(first.allowed(), before)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (json_form({"type": "strin"}), "Invalid type: strin"),
        (json_form({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_form({"uniqueItems": True, "type": "array", "x-guidance": {"lenient": True}}),
         "uniqueItems"),
        (json_form({"enum": []}), "Unsatisfiable"),
        (regex_form("(a"), "unclosed group"),
        (regex_form("a\\"), ""),
        (lark_form("start: nothing"), "unknown name"),
        (lark_form("begin: /a/"), "start"),
        (json_form({"type": "object", "properties": {
            f"p{i}": {"type": "string", "maxLength": 100} for i in range(90_000)}}), ""),
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_no_grammar_is_refused_soon(byte_level, folder, form, told) -> None:
    tokenizer = Tokenizer.from_folder(folder(byte_level))
    start = time.perf_counter()
    with pytest.raises(BadGrammar) as caught:
        compiled(tokenizer, form)
    assert told in caught.value.message
    assert time.perf_counter() - start < 60, "seconds at most; a busy machine may take more"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    shipped = Tokenizer.from_folder(find_model("etude"))
    return Grammars(shipped, shipped.vocab_size)


def keys(count: int, **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {f"k{i}": {"type": "string"} for i in range(count)},
    } | more


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (regex_form("(ab){1000000}"), "too many"),
        (json_form({"const": "y" * 9000}), "9,000 characters (allowed: at most 4,096)"),
        (choice_form(["no", "y" * 9000]), "9,000 characters"),
        (json_form(keys(3000)), "12007 items"),
    ],
    ids=["pattern", "const", "choice", "optional keys"],
)  # fmt: skip
def test_what_no_step_can_bear_is_refused(grammars, form, told) -> None:
    with pytest.raises(BadGrammar) as caught:
        grammars.check(answer_grammar(form))
    assert told in caught.value.message


@pytest.mark.parametrize(
    "form",
    [
        json_form(keys(3000, required=[f"k{i}" for i in range(3000)])),
        json_form({"enum": [f"v{i}" for i in range(5000)]}),
        choice_form([f"text {i}" for i in range(10_000)]),
        choice_form(["x" * 800 + str(i) for i in range(60)]),
        regex_form("(a|b|c|d){1,400}x?(e|f){1,300}"),
    ],
    ids=["keys", "enum", "choice", "long texts", "pattern"],
)
def test_what_is_large_and_plain_is_taken(grammars, form) -> None:
    grammars.check(answer_grammar(form))


def test_a_forced_text_comes_in_parts_with_the_same_ids(grammars) -> None:
    shipped = Tokenizer.from_folder(find_model("etude"))
    text = " ".join(f"value_{i} = {i * i};" for i in range(300))
    lark = "start: " + " ".join(json.dumps(text[i : i + 4000]) for i in range(0, len(text), 4000))
    matcher = grammars.compile(answer_grammar(lark_form(lark))).start()
    parts = []
    while not matcher.is_complete:
        parts.append(matcher.forced() or ids_of(matcher.allowed())[:1])
        for token_id in parts[-1]:
            matcher.take(token_id)
    assert len(parts) > 3
    assert max(map(len, parts)) < 2048
    assert [token_id for part in parts for token_id in part] == shipped.encode(text)


def test_no_step_takes_long_whatever_is_forced(grammars) -> None:
    """Before, these took 0.4 and 1.6 s, with Python's lock held."""
    for pattern in ("(x|y)(ab){60000}", "(x|y)((ab){1000}){1000}"):
        matcher = grammars.compile(answer_grammar(regex_form(pattern))).start()
        took = list[float]()
        with pytest.raises(GrammarFailed, match="too many"):
            follow(matcher, took)
        assert max(took) < 0.2


def follow(matcher: Matcher, took: list[float]) -> None:
    """Take what is forced, else the first that is allowed; `took` has seconds of each step."""
    while not matcher.is_complete:
        start = time.thread_time()
        for token_id in matcher.forced() or ids_of(matcher.allowed())[:1]:
            matcher.take(token_id)
        took.append(time.thread_time() - start)


def test_x_guidance_may_write_json_otherwise(byte_level, folder) -> None:
    tokenizer = Tokenizer.from_folder(folder(byte_level))
    schema = {**SCHEMA, "x-guidance": {"key_separator": ":", "item_separator": ","}}
    ids, _ = walk(compiled(tokenizer, json_form(schema)), 1)
    assert text_of(tokenizer, ids).startswith('{"größe":')
    ids, is_whole = walk(compiled(tokenizer, object_form()), 3)
    assert text_of(tokenizer, ids).startswith("{")
    assert not is_whole or isinstance(json.loads(text_of(tokenizer, ids)), dict)
