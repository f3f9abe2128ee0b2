"""Token ids against transformers' AutoTokenizer on the same folder, and refusals."""

import json
import os

import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from soloist.errors import ConfigError, MissingFile, NotAFile, RequestError, TokenizerError
from soloist.text import Tokenizer
from soloist.text.files import read_default_tokens, read_eos_ids
from soloist.text.processor import Processor, ProcessorFiles

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "  two  spaces, and trailing  ",
    "[INST] <<SYS>>\nBe kind\n<</SYS>> [/INST]</s><s>[INST] again [/INST]",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<tool_call>日本語</tool_call> <extra> x <pad>",
    "你好，世界 😀👩‍👩‍👧‍👦 e\u0301 Zażółć \ufffd\u200d",
    "def f(x):\n\treturn x  # ½\r\n",
]
BARE = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
# Of every case: the tokenizer's fixture and the files beside its tokenizer.json.
FOLDERS = {
    "bare": ("byte_level", {"tokenizer_config": BARE}),
    "add_bos_token has no say": (
        "byte_level",
        {"tokenizer_config": BARE | {"bos_token": "<|endoftext|>", "add_bos_token": True}},
    ),
    "bos from the post-processor": (
        "byte_fallback",
        {"tokenizer_config": BARE | {"bos_token": "<s>", "add_bos_token": False}},
    ),
    "special tokens as objects": (
        "byte_level",
        {
            "tokenizer_config": BARE
            | {
                "eos_token": {
                    "__type": "AddedToken",
                    "content": "<|im_end|>",
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                }
            }
        },
    ),
    "tokens only in tokenizer_config.json": (
        "byte_level",
        {
            "tokenizer_config": BARE
            | {
                "pad_token": "<pad>",
                "additional_special_tokens": ["<extra>", "<tool_call>"],
                "image_token": "<image>",
            }
        },
    ),
    "special_tokens_map.json overrules": (
        "byte_level",
        {
            "tokenizer_config": BARE | {"eos_token": "<|endoftext|>"},
            "special_tokens_map": {
                "eos_token": "<|im_end|>",
                "pad_token": {
                    "content": "<pad>",
                    "lstrip": True,
                    "normalized": False,
                    "rstrip": True,
                    "single_word": False,
                },
            },
        },
    ),
    "ids in added_tokens.json": (
        "byte_level",
        {"tokenizer_config": BARE | {"pad_token": "<pad>"}, "added_tokens": {"<extra>": 422}},
    ),
    "Llama class": (
        "byte_fallback",
        {
            "config": {"model_type": "llama"},
            "tokenizer_config": LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "legacy": False},
        },
    ),
    "Llama class, legacy": (
        "byte_fallback",
        {
            "config": {"model_type": "llama"},
            "tokenizer_config": LLAMA | {"legacy": True},
        },
    ),
    "Llama class without prefix space": (
        "byte_fallback",
        {
            "config": {"model_type": "llama"},
            "tokenizer_config": LLAMA | {"add_prefix_space": False},
        },
    ),
    "Llama class over byte level": (
        "byte_level",
        {
            "config": {"model_type": "llama"},
            "tokenizer_config": {"tokenizer_class": "LlamaTokenizer"},
        },
    ),
    "Llama class of a Mistral model": (
        "byte_fallback",
        {
            "config": {"model_type": "mistral"},
            "tokenizer_config": LLAMA,
        },
    ),
    "special tokens split": (
        "byte_level",
        {"tokenizer_config": BARE | {"split_special_tokens": True}},
    ),
}


@pytest.fixture(params=FOLDERS.values(), ids=FOLDERS.keys())
def any_folder(request, folder):
    kind, files = request.param
    return folder(request.getfixturevalue(kind), **files)


def test_ids_and_text_equal_transformers(any_folder):
    theirs = AutoTokenizer.from_pretrained(any_folder)
    ours = Tokenizer.from_folder(any_folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                got = ours.decode(ids, skip_special_tokens=skip)
                assert got == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)
    known = {name: str(token) for name, token in theirs.special_tokens_map.items()}
    assert known.items() >= ours.special_tokens.items()


def test_ids_in_added_tokens_decoder_are_kept(byte_level, folder):
    size = byte_level.get_vocab_size()
    rules = {"lstrip": False, "normalized": False, "rstrip": True, "single_word": False}
    listed = {
        str(size + index): {"content": text, "special": index == 0, **rules}
        for index, text in enumerate(["<extra>", "<pad>"])
    }
    path = folder(byte_level, tokenizer_config=BARE | {"added_tokens_decoder": listed})
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer.from_folder(path)
    assert ours.encode("<extra> x")[0] == size
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert size in ours.special_ids
    assert size + 1 not in ours.special_ids
    assert [ours.special_id(text) for text in ("<extra>", "<pad>", "none")] == [size, None, None]


def test_truncation_and_padding_of_the_file_are_ignored(byte_level, folder):
    limited = Backend.from_str(byte_level.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    ids = Tokenizer.from_folder(folder(limited)).encode("more than two tokens")
    assert 2 < len(ids) < 50


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [2, 1]}, "config": {"eos_token_id": 7}}, {1, 2}),
        ({"generation_config": {"eos_token_id": 2}}, {2}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 0}}, {0}),
        ({"config": {}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_start|>"}}}, {1}),
        ({}, set()),
    ],
)
def test_eos_ids_come_from_the_first_file_that_names_them(byte_level, folder, files, expected):
    assert Tokenizer.from_folder(folder(byte_level, **files)).eos_ids == expected


@pytest.mark.parametrize(("value", "expected"), [(1024, 1024), (1, 1), (None, None)])
def test_default_tokens_come_from_the_file(byte_level, folder, value, expected):
    path = folder(byte_level, generation_config={"max_new_tokens": value})
    assert read_default_tokens(path) == expected


@pytest.mark.parametrize("value", ["2", [1], 0, -1, True, 1.5])
def test_unusable_default_tokens_are_refused(byte_level, folder, value):
    path = folder(byte_level, generation_config={"max_new_tokens": value})
    with pytest.raises(ConfigError, match=r"generation_config\.json: field 'max_new_tokens'"):
        read_default_tokens(path)


@pytest.mark.parametrize("value", ["2", [1, None], -1, True, 1.5])
def test_unusable_eos_ids_are_refused(byte_level, folder, value):
    path = folder(byte_level, generation_config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"generation_config\.json: field 'eos_token_id'"):
        Tokenizer.from_folder(path)


def test_token_bytes_joined_are_the_text(byte_level, byte_fallback, unigram):
    text = "naïve 😀 line\n"
    for backend in (byte_level, byte_fallback, unigram):
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined.removeprefix(" ") == text
        assert tokenizer.token_bytes(10**6) == b""


def test_missing_tokenizer_tells_what_to_do(folder, tmp_path):
    with pytest.raises(MissingFile, match=r"holds no tokenizer\.json \(it holds: config\.json\)"):
        Tokenizer.from_folder(folder(config={}))
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(MissingFile, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"model": ', "not valid JSON: .*line 1"),
        (b"[]", "holds a JSON list"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b'{"version": "1.0", "model": {"type": "Alien"}}', "cannot read"),
    ],
)
def test_damaged_tokenizer_is_refused(tmp_path, content, sentence):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json is damaged.*{sentence}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config", "special_tokens_map", "added_tokens", "generation_config", "config"],
)
def test_malformed_json_names_its_file(byte_level, folder, name):
    path = folder(byte_level)
    (path / f"{name}.json").write_text("{,}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=rf"{name}\.json is damaged: not valid JSON"):
        Tokenizer.from_folder(path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"eos_token": 5}, "field 'eos_token' is 5"),
        ({"additional_special_tokens": "x"}, "expected a list of tokens"),
        ({"added_tokens_decoder": [1]}, "field 'added_tokens_decoder' cannot be read"),
        ({"added_tokens_decoder": {"1": {"wrong": 2}}}, "added_tokens_decoder' cannot be read"),
        ({"added_tokens_decoder": {"9999": {"content": "<new>"}}}, "'<new>' has id 9999"),
    ],
)
def test_contradictions_in_tokenizer_config_are_refused(byte_level, folder, config, sentence):
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.from_folder(folder(byte_level, tokenizer_config=config))


def test_clean_up_is_ignored_for_bpe_and_refused_elsewhere(byte_level, unigram, folder):
    config = {"clean_up_tokenization_spaces": True}
    tokenizer = Tokenizer.from_folder(folder(byte_level, tokenizer_config=config))
    assert tokenizer.decode(tokenizer.encode("it 's . it")) == "it 's . it"
    with pytest.raises(TokenizerError, match="clean_up_tokenization_spaces"):
        Tokenizer.from_folder(folder(unigram, tokenizer_config=config))


def test_a_tokenizer_without_decoder_is_refused(byte_level):
    description = json.loads(byte_level.to_str()) | {"decoder": None}
    with pytest.raises(TokenizerError, match="has no decoder"):
        Tokenizer(Backend.from_str(json.dumps(description)))


def test_half_a_surrogate_pair_is_refused(byte_level):
    with pytest.raises(RequestError, match="surrogate pair at position 2"):
        Tokenizer(byte_level).encode("ab\ud83d")


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<PRE>", "<SUF>", "<MID>"),
    ],
)
def test_fim_prompt_is_prefix_suffix_middle(byte_level, marks):
    backend = Backend.from_str(byte_level.to_str())
    backend.add_special_tokens(list(marks))
    tokenizer = Tokenizer(backend)
    assert tokenizer.fills_in
    ids = tokenizer.fim_prompt("def f(", "\n    return x")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == f"{marks[0]}def f({marks[1]}\n    return x{marks[2]}"


def test_fim_prompt_begins_with_bos_and_adds_no_space_to_the_suffix(byte_fallback):
    backend = Backend.from_str(byte_fallback.to_str())
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>"]
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"})
    ids = tokenizer.fim_prompt("the", "the")
    pre, suf, mid = map(backend.token_to_id, marks)
    with_space = tokenizer.encode("the", add_special_tokens=False)
    assert ids[: 3 + len(with_space)] == [tokenizer.bos_id, pre, *with_space, suf]
    assert b"".join(map(tokenizer.token_bytes, ids[3 + len(with_space) : -1])) == b"the"
    assert ids[-1] == mid


def test_a_model_without_fim_tokens_is_refused(byte_level):
    assert not Tokenizer(byte_level).fills_in
    with pytest.raises(TokenizerError, match="has no fill-in-the-middle tokens"):
        Tokenizer(byte_level).fim_prompt("a", "b")


def test_a_post_processor_that_ends_texts_is_followed(byte_level, folder):
    backend = Backend.from_str(byte_level.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    path = folder(backend, tokenizer_config=BARE)
    ids = Tokenizer.from_folder(path).encode("x")
    assert ids == AutoTokenizer.from_pretrained(path).encode("x")
    assert ids[-1] == 2


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_pipe_in_a_files_place_is_refused(byte_level, folder, name):
    path = folder(byte_level)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(NotAFile, match=f"{name} is a pipe"):
        Tokenizer.from_folder(path)


def test_json_that_is_nested_too_deeply_is_refused(byte_level, folder):
    path = folder(byte_level)
    (path / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is damaged: .* deeply"):
        Tokenizer.from_folder(path)


def test_an_eos_id_outside_the_vocabulary_is_refused_by_file(byte_level, folder):
    path = folder(byte_level, generation_config={"eos_token_id": [3, 31]})
    assert read_eos_ids(path, 32) == {3, 31}
    with pytest.raises(ConfigError, match=r"generation_config.*eos_token_id.*size of 31"):
        read_eos_ids(path, 31)


def test_an_eos_token_outside_the_vocabulary_is_refused_with_the_tokenizer(byte_level, folder):
    path = folder(byte_level, tokenizer_config=BARE | {"eos_token": "<|endoftext|>"})
    (eos_id,) = Tokenizer.from_folder(path).eos_ids
    Processor(ProcessorFiles(path, eos_id + 1, 64))
    with pytest.raises(TokenizerError, match=f"id {eos_id}, outside the model's vocabulary"):
        Processor(ProcessorFiles(path, eos_id, 64))
