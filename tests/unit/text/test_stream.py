"""Streamed text against whole decoding, on random tokens."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from soloist.errors import BadSampling, TokenizerError
from soloist.text import TextStream, Tokenizer

KINDS = ["byte_level", "byte_fallback", "unigram"]
TEXTS = [
    "def main(path):\n    return path",
    "  leading and trailing  ",
    "你好，世界 😀👩‍👩‍👧‍👦 e\u0301 नमस्ते",
    "a\U0001f600\u200db 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \ufffd",
    "",
]
# Every byte sequence that begins a UTF-8 character without being one; the last byte of a character
# carries six free bits, so one code point in 64 shows them all.
UNFINISHED = {
    encoded[:length]
    for code in range(0x80, 0x110000, 64)
    if not 0xD800 <= code < 0xE000
    for encoded in [chr(code).encode()]
    for length in range(1, len(encoded))
}

ids_of_any_kind = st.lists(st.integers(0, 10**9), max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=8)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return Tokenizer(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def byte_tokenizer(byte_level: Backend) -> Tokenizer:
    return Tokenizer(byte_level)


@pytest.fixture(scope="module")
def fallback_tokenizer(byte_fallback: Backend) -> Tokenizer:
    return Tokenizer(byte_fallback)


def pieces(stream: TextStream, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pushed = [stream.push(ids[a:b]) for a, b in pairwise(borders)]
    return [*pushed, stream.finish()]


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The definition: cut at the stop string complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        for wanted in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(wanted):
                return text[: end - len(wanted)]
    return text


@given(numbers=ids_of_any_kind, cuts=cuts, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_joined_are_the_decoded_text(tokenizer, numbers, cuts, skip):
    ids = [number % (tokenizer.vocab_size + 2) for number in numbers]  # two ids mean nothing
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    assert "".join(pieces(stream, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30) | st.sampled_from(TEXTS), noise=ids_of_any_kind)
@settings(max_examples=100, deadline=None)
def test_text_with_noise_streams_as_decoded(tokenizer, text, noise):
    ids = tokenizer.encode(text)
    for number in noise[:3]:
        ids.insert(number % (len(ids) + 1), number % tokenizer.vocab_size)
    got = pieces(TextStream(tokenizer), ids, range(len(ids)))
    assert "".join(got) == tokenizer.decode(ids)


def test_the_beginning_of_a_surrogate_is_not_waited_for(byte_tokenizer):
    letters = {byte_tokenizer.token_bytes(i): i for i in range(byte_tokenizer.vocab_size)}
    stream = TextStream(byte_tokenizer)
    shown = [stream.push([letters[bytes([byte])]]) for byte in (0xED, 0xA2, 0x80, 0xED, 0x95, 0x9C)]
    assert shown == ["", "\ufffd\ufffd", "\ufffd", "", "", "한"]


@given(numbers=ids_of_any_kind, stop=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_byte_level_holds_back_no_more_than_needed(byte_tokenizer, numbers, stop):
    """After each token: all but an unfinished character and a possible stop string is out."""
    letters = [byte_tokenizer.encode(text)[0] for text in ("a", "b", "c", " ", "ab", "é")]
    size = byte_tokenizer.vocab_size
    ids = [
        letters[number % 6] if number % 2 else number % size for number in numbers
    ]  # half of them from the stop strings' alphabet
    stream = TextStream(byte_tokenizer, stop)
    shown, data = "", b""
    for token_id in ids:
        shown += stream.push([token_id])
        if token_id not in byte_tokenizer.special_ids:
            data += byte_tokenizer.token_bytes(token_id)
        tail = next((n for n in (3, 2, 1) if data[-n:] in UNFINISHED and n <= len(data)), 0)
        certain = data[: len(data) - tail].decode(errors="replace")
        if (cut := text_before_stop(certain, stop)) != certain or stream.stopped:
            assert stream.stopped
            assert shown == cut
            break
        beginnings = {wanted[:n] for wanted in stop for n in range(1, len(wanted))}
        held = max((len(start) for start in beginnings if certain.endswith(start)), default=0)
        assert shown == certain[: len(certain) - held]


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=cuts,
)
@settings(max_examples=300, deadline=None)
def test_stop_string_complete_first_wins_however_the_text_is_cut(tokenizer, text, stop, cuts):
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop)
    assert "".join(pieces(stream, ids, cuts)) == text_before_stop(text, stop)
    if text_before_stop(text, stop) == text and not any(map(text.endswith, stop)):
        assert stream.stopped is None
        assert stream.num_tokens == len(ids)


def test_a_stop_string_ends_the_stream_at_its_token(byte_tokenizer):
    ids = byte_tokenizer.encode("one<b>two</b>three")
    stream = TextStream(byte_tokenizer, ["</b>", "</i>"])
    assert stream.push(ids) == "one<b>two"
    assert stream.stopped == "</b>"
    assert byte_tokenizer.decode(ids[: stream.num_tokens]).endswith("</b>")
    assert stream.push(ids) == ""
    assert stream.finish() == ""


def test_what_may_become_a_stop_string_waits_and_comes_back(byte_tokenizer):
    stream = TextStream(byte_tokenizer, ["\n\n#"])
    newline, other = byte_tokenizer.encode("\n"), byte_tokenizer.encode("x")
    assert stream.push(newline) == ""
    assert stream.push(other) == "\nx"
    assert stream.push(newline) == ""
    assert stream.finish() == "\n"


def test_a_character_appears_with_its_last_byte(byte_tokenizer):
    ids = byte_tokenizer.encode("🦊")
    assert len(ids) > 1
    stream = TextStream(byte_tokenizer)
    assert [stream.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🦊"]


def test_a_run_of_byte_tokens_waits_for_its_end(fallback_tokenizer):
    """One bad byte would turn the whole run into replacement characters."""
    run = fallback_tokenizer.encode("🦊🦊", add_special_tokens=False)[1:]
    bad = fallback_tokenizer.encode("🦊", add_special_tokens=False)[-1:]
    word = fallback_tokenizer.encode("o", add_special_tokens=False)[-1:]
    stream = TextStream(fallback_tokenizer)
    assert stream.push(run) == ""
    assert stream.push(word).startswith("🦊🦊")
    stream = TextStream(fallback_tokenizer)
    assert stream.push(run + bad) == ""
    assert stream.finish() == "\ufffd" * 9 == fallback_tokenizer.decode(run + bad)


def test_the_space_before_the_first_word_is_not_shown(fallback_tokenizer):
    ids = fallback_tokenizer.encode("the the", add_special_tokens=False)
    stream = TextStream(fallback_tokenizer)
    assert "".join(stream.push([token_id]) for token_id in ids) == "the the"


def test_special_tokens_are_shown_on_request(byte_tokenizer):
    ids = byte_tokenizer.encode("<|im_start|>x<tool_call>")
    assert TextStream(byte_tokenizer).push(ids) == "x<tool_call>"
    shown = TextStream(byte_tokenizer, skip_special_tokens=False).push(ids)
    assert shown == "<|im_start|>x<tool_call>"


@pytest.mark.parametrize("stop", ["text", [""], ["a", ""], [1]])
def test_unusable_stop_strings_are_refused(byte_tokenizer, stop):
    with pytest.raises(BadSampling, match="stop is"):
        TextStream(byte_tokenizer, stop)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Fuse(),
        decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_decoders_without_an_exact_stream_are_refused(byte_level, decoder):
    changed = Backend.from_str(byte_level.to_str())
    changed.decoder = decoder
    with pytest.raises(TokenizerError, match=r"decoder .* is not supported"):
        Tokenizer(changed)
