"""Patterns of configurations: those that people write are read, those that take hours are not."""

import re
import time

import pytest

from soloist.model.quantization.patterns import compile_bounded

LONG = "model.layers.100.self_attn.o_projection"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*lm_head", r".*self_attn\.(q|k|v|o)_proj$", r"^(?!.*gate).*", r"(?:\.\d){2}x?",
        r"model\.layers\.(0|1|10)\.mlp\..*$", r".*\.(?:[0-9]|1[0-7])\..*down.*",
        r"(?:model\.)?layers\.[0-9]+\.(mlp|self_attn)\.(gate|up|down|q|k|v|o)_proj",
        r".*model.*layers.*mlp.*proj.*", r"layers\.\d{1,3}\.", "[[a]", "",
        # of adapters
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
        r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel"
        r"\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:k_proj"
        r"|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj)))",
    ],
)  # fmt: skip
def test_patterns_of_module_names_are_those_of_python(pattern: str) -> None:
    assert compile_bounded(pattern).pattern == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.?)+X", "(a*)*", "(?:.|..)+X", ".*" * 8 + "X", "(?:.|..)" * 30 + "X",
        "(?:(?:a?){30}){30}", "(?:a{0,60}){0,60}", "(?:..?)?" * 14 + "X", "(?=(.+)+X)",
        ".*" * 4 + "(?:" + "|".join(f"m{n}" for n in range(50)) + ")X", "(?:a|ab|abc)" * 20 + "X",
    ],
)  # fmt: skip
def test_patterns_with_too_many_choices_are_refused_at_once(pattern: str) -> None:
    re.compile(pattern)
    with pytest.raises(ValueError, match="a repeat within a repeat, or too many choices"):
        compile_bounded(pattern)


@pytest.mark.parametrize(
    "pattern", ["(", "a**", "a{99999999999999999999}", "(" * 3000 + ")" * 3000]
)
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        compile_bounded(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*" * 5 + "X", ".?" * 22 + "X", "(?:.*|.*)(?:.+|.+).*.*X",
        ".*" * 4 + "(?:" + "|".join(f"l{n:02}" for n in range(36)) + ")X",
    ],
)  # fmt: skip
def test_the_worst_that_is_read_takes_no_second(pattern: str) -> None:
    found, start = compile_bounded(pattern), time.process_time()
    assert found.match(LONG) is None
    assert time.process_time() - start < 1
