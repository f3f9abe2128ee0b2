"""Which GGUF file a word means, by names alone."""

import pytest

from soloist.errors import GgufChoice
from soloist.model.gguf.choosing import choose, distinct_tags, models_in, parts, tag_of

NAMES = [
    "README.md",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-UD-Q4_K_XL.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "Qwen3-8B.BF16.gguf",
    "imatrix.gguf",
    "mmproj-BF16.gguf",
    "big/Qwen3-8B-F32-00001-of-00002.gguf",
    "big/Qwen3-8B-F32-00002-of-00002.gguf",
    "half-Q6_K-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("Q4_K_M", NAMES[1]),
        ("q4_k_m", NAMES[1]),
        ("Q4_K_XL", NAMES[2]),
        ("ud-q4_k_xl", NAMES[2]),
        ("BF16", NAMES[4]),
        ("f32", NAMES[7]),
        ("big", NAMES[7]),
        ("Qwen3-8B-Q8_0.gguf", NAMES[3]),
        ("qwen3-8b-q8_0", NAMES[3]),
        ("big/Qwen3-8B-F32", NAMES[7]),
    ],
)
def test_a_tag_is_a_part_of_the_name(tag: str, name: str) -> None:
    assert choose("x", NAMES, tag) == name


@pytest.mark.parametrize("tag", ["Q4_K", "Q6_K", "K_M", "8", "mmproj", "", ".gguf", "\x1b[2J", "("])
def test_no_file_is_guessed(tag: str) -> None:
    with pytest.raises(GgufChoice, match="holds no GGUF model") as caught:
        choose("x", NAMES, tag)
    assert "\x1b" not in str(caught.value)


def test_a_tag_that_means_several() -> None:
    with pytest.raises(GgufChoice, match="'Qwen3' means 5 GGUF models of x"):
        choose("x", NAMES, "Qwen3")


def test_the_plain_name_goes_before_a_longer_one() -> None:
    assert choose("x", ["m-Q8_0-old.gguf", "m-Q8_0.gguf"], "Q8_0") == "m-Q8_0.gguf"


def test_models_are_whole_and_no_helpers() -> None:
    assert models_in(NAMES) == sorted([*NAMES[1:5], NAMES[7]])
    assert parts(NAMES[7]) == NAMES[7:9]


def test_tags_tell_models_apart() -> None:
    assert tag_of(NAMES[2]) == "UD-Q4_K_XL"
    assert tag_of("some-model.gguf") == "some-model"
    names = ["a-Q8_0.gguf", "b-Q8_0.gguf", "b-Q4_0.gguf"]
    assert list(distinct_tags(names).values()) == ["a-Q8_0.gguf", "b-Q8_0.gguf", "Q4_0"]
