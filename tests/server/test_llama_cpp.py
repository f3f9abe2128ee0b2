"""llama.cpp's API, with the requests of editors that complete while one types."""

import json
import re
from types import SimpleNamespace

import httpx2
import pytest

from server.running import (
    KEY,
    Scripted,
    etude,
    is_idle,
    oracle,
    running,
    scripted,
    wait_for,
    wait_until_ready,
)
from server.test_openai import answer
from soloist.server.preparation.llama_cpp import InfillRequest, prepare_infill

PREFIX, SUFFIX = "def add(a, b):\n", "\n\nprint(add(1, 2))\n"
# llama.vim tells times as Vim does, by seconds and microseconds.
EXTRA = {"text": "def sub(a, b):\n    return a - b\n", "time": [7, 500], "filename": "sub.py"}
FIELDS = [
    "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
    "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
    "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached",
]  # fmt: skip
# As the two plugins send them by their sources of 2026: llama.vim of commit 381730b, and
# llama.vscode's src/llama-server.ts.
VIM = {
    "id_slot": 0, "stop": [], "n_cmpl": 1,
    "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": [EXTRA], "prompt": "    ret",
    "n_predict": 16, "n_indent": 4, "top_k": 40, "top_p": 0.90, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 3000, "response_fields": FIELDS,
}  # fmt: skip
# llama.vim as llama.cpp's tree has it sends less, and reads the whole reply.
OLDER_VIM = {
    name: value
    for name, value in VIM.items()
    if name not in ("id_slot", "stop", "n_cmpl", "response_fields")
} | {"top_p": 0.99}
OLDER_VIM_WARM_UP = {
    "input_prefix": "", "input_suffix": "", "input_extra": [EXTRA], "prompt": "", "n_predict": 1,
    "temperature": 0.0, "stream": False, "samplers": ["temperature"], "cache_prompt": True,
    "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
}  # fmt: skip
VSCODE = {
    "id_slot": 0, "n_cmpl": 3,
    "input_prefix": PREFIX, "input_suffix": SUFFIX,
    "input_extra": [{"text": EXTRA["text"], "time": 7, "filename": "sub.py"}], "prompt": "    ret",
    "n_predict": 16, "top_k": 40, "top_p": 0.99, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}  # fmt: skip
WARM_UP = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": [EXTRA], "prompt": "",
    "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}  # fmt: skip


# As llama.vim sends it.
VIM_WARM_UP = WARM_UP | {
    "temperature": 0.0,
    "stream": False,
    "response_fields": [""],
    "t_max_prompt_ms": 1,
}


def filled(max_tokens: int = 16) -> str:
    """The engine's answer to the plugins' requests; étude has no marks for files."""
    prefix = EXTRA["text"].rstrip("\n") + "\n\n" + PREFIX + "    ret"
    return answer(oracle().tokenizer.fim_prompt(prefix, SUFFIX), max_tokens=max_tokens).text


def test_a_request_of_llama_vim(http) -> None:
    # With no key it sends the header all the same where it asks for instructions.
    sent = http.post("/infill", json=VIM, headers={"Authorization": "Bearer"})
    # It takes one line, and looks for these letters before it reads it.
    assert re.search(r'^\{.*"content"\s*:"', sent.text)
    assert "\n" not in sent.text
    reply = sent.json()
    assert set(reply) == set(FIELDS)
    assert reply["content"]
    assert filled().startswith(reply["content"])
    assert reply["truncated"] is False
    assert reply["timings/prompt_n"] > 20


def test_requests_of_older_plugins(http) -> None:
    assert http.post("/infill", json=OLDER_VIM_WARM_UP).json()["tokens_predicted"] == 1
    reply = http.post("/infill", json=OLDER_VIM).json()
    assert filled().startswith(reply["content"])
    assert reply["generation_settings"]["n_ctx"] == etude().resolved.context_tokens
    assert reply["truncated"] is False
    assert reply["tokens_cached"] >= 0
    for figure in ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"):
        assert reply["timings"][figure] > 0
    assert reply["timings"]["predicted_per_second"] > 0


def test_a_request_of_llama_vscode(http) -> None:
    reply = http.post("/infill", json=VSCODE).json()
    assert reply["content"] == filled()
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"] > 0
    assert reply["generation_settings"]["temperature"] == 0, "infill takes the best token"
    assert reply["generation_settings"]["samplers"] == ["top_k", "top_p", "infill"]
    assert reply["stop_type"] in ("limit", "eos")
    (told,) = reply["warnings"]
    assert told.startswith("n_cmpl is 3, but ")
    (only, *_, last) = http.post("/infill", json=VSCODE | {"stream": True}).text.split("\n\n")[:-1]
    assert "warnings" not in only
    assert told in last
    assert "warnings" not in http.post("/infill", json=VSCODE | {"n_cmpl": 1}).json()


def test_an_instruction_of_llama_vim(http) -> None:
    ask = {
        "id_slot": 0, "messages": [{"role": "user", "content": "INSTRUCTION: shorten"}],
        "min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"], "stream": True,
        "cache_prompt": True, "max_tokens": 4,
    }  # fmt: skip
    reply = http.post("/v1/chat/completions", json=ask)
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")
    for changed, words in (
        ({"top_p": 0.5}, "leaves out top_p, whose field is given"),
        ({"samplers": []}, "leaves out temperature"),
        ({"samplers": ["min_p", "magic"]}, "no sampler 'magic'"),
        ({"samplers": ["infill"]}, "samplers is not supported"),
    ):
        reply = http.post("/v1/chat/completions", json=ask | changed)
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]


def test_an_agents_limits_in_llama_vscode(http) -> None:
    """It bounds its answers by what the server lists, and counts a prompt's tokens here."""
    card, *_ = http.get("/v1/models").json()["data"]
    assert card["context_length"] == etude().resolved.context_tokens
    text = etude().chat_template.source[:40]
    ask = {"content": text, "add_special": False, "parse_special": True}
    counted = http.post("/tokenize", json=ask).json()["tokens"]
    assert counted == oracle().tokenizer.encode(text, add_special_tokens=False)
    edit = {
        "messages": [
            {"role": "system", "content": "You are an expert coder."},
            {"role": "user", "content": "Shorten it"},
        ],
        "stream": False, "cache_prompt": True, "temperature": 0.8, "top_p": 0.95, "max_tokens": 4,
    }  # fmt: skip
    assert http.post("/v1/chat/completions", json=edit).status_code == 200


def test_a_warm_up_reads_and_caches_but_says_nothing(http) -> None:
    pieces = [EXTRA | {"text": f"def f{n}(x):\n    return x + {n}\n"} for n in range(20)]
    reply = http.post("/infill", json=WARM_UP | {"input_extra": pieces}).json()
    assert reply["content"] == ""
    assert reply["tokens_predicted"] == 0
    assert http.post("/infill", json=VIM_WARM_UP).json() == {}
    after = http.post("/infill", json=VSCODE | {"input_extra": pieces}).json()
    assert after["tokens_cached"] >= 128


def test_completion_streamed_and_whole(http) -> None:
    ask = {"prompt": PREFIX, "n_predict": 12, "temperature": 0, "return_tokens": True}
    wanted = answer(PREFIX, max_tokens=12)
    whole = http.post("/completion", json=ask).json()
    assert whole["content"] == wanted.text
    assert whole["tokens"] == list(wanted.token_ids)
    ids = oracle().tokenizer.encode(PREFIX)
    assert http.post("/completion", json=ask | {"prompt": ids}).json()["content"] == wanted.text
    told = http.post("/completion", json=ask | {"stream": True}).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in told]
    assert "".join(e["content"] for e in events) == wanted.text
    assert [e["stop"] for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_evaluated"] == len(ids)
    stop = wanted.text[4:7]
    held = http.post("/completion", json=ask | {"stop": [stop]}).json()
    assert held["content"] == wanted.text[: wanted.text.index(stop)]
    assert (held["stop_type"], held["stopping_word"]) == ("word", stop)


def test_samplers_that_are_not_listed_are_not_used(http) -> None:
    ask = {"prompt": PREFIX, "n_predict": 8, "temperature": 0.5, "min_p": 0.2, "seed": 1}
    settings = http.post("/completion", json=ask | {"samplers": "mk"}).json()["generation_settings"]
    assert (settings["temperature"], settings["min_p"]) == (1, 0.2)
    settings = http.post("/completion", json=ask | {"samplers": ["temperature"]}).json()
    settings = settings["generation_settings"]
    assert settings["temperature"] == 0.5
    assert "min_p" not in settings


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"grammar": "root ::= x"}, "grammar is not supported"),
        ({"n_probs": 3}, "n_probs is not supported (allowed: 0)"),
        ({"n_cmpl": 2}, "n_cmpl is not supported (allowed: 1, or more with"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"samplers": ["top_k", "magic"]}, "no sampler 'magic' (available: penalties"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"presence_penalty": 1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora is not supported"),
        ({"colour": 1}, "colour is not supported"),
        ({"prompt": "x = 1\n" * 2000}, "holds 2,048"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, changed, words) -> None:
    reply = http.post("/completion", json={"prompt": PREFIX, "n_predict": 4} | changed)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_pieces_of_other_files_stand_between_marks() -> None:
    words = {"<|repo_name|>": 1, "<|file_sep|>": 2}

    def encode(text: str, **_: object) -> list[int]:
        return [words[text]] if text in words else [1000 + ord(c) for c in text]

    named = {number: word for word, number in words.items()}
    processor = SimpleNamespace(
        default_tokens=None,
        encode=encode, context_tokens=500, check_prompt=lambda *_: None, grammars=None,
        tokenizer=SimpleNamespace(bos_id=9, token=named.get),
        fim_prompt=lambda prefix, suffix: [9, 3, *encode(prefix), 4, *encode(suffix), 5],
    )  # fmt: skip
    asked = InfillRequest(input_prefix="p", prompt="q", input_suffix="s", input_extra=[])
    (plain,) = prepare_infill(processor, asked, "m").prompts
    assert plain.prompt_ids == (9, 3, *encode("pq"), 4, *encode("s"), 5)
    asked.input_extra = InfillRequest(input_extra=[{"text": "t", "filename": "f"}]).input_extra
    (marked,) = prepare_infill(processor, asked, "m").prompts
    files = (1, *encode("project\n"), 2, *encode("f\nt\n"), 2, *encode("current\n"))
    assert marked.prompt_ids == (9, *files, *plain.prompt_ids[1:])
    assert marked.params.stop_token_ids == {1, 2}, "where the next file begins, the answer ends"


def test_answers_end_by_indentation_and_by_time() -> None:
    text = "x = 1\n    y = 2\nz = 3\n"
    ask = {"prompt": PREFIX, "n_predict": 2000, "temperature": 0}
    with running(lambda _: scripted(Scripted(text, 200))) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as http:
            cut = http.post("/completion", json=ask | {"n_indent": 4}).json()
            assert cut["content"] == "x = 1\n    y = 2"
            assert cut["stop_type"] == "limit"
            assert cut["timings"]["predicted_n"] < 100
            timed = http.post("/completion", json=ask | {"t_max_predict_ms": 300}).json()
            assert timed["has_new_line"]
            assert 20 < timed["tokens_predicted"] < 500
            with http.stream("POST", "/completion", json=ask | {"stream": True}) as reply:
                next(reply.iter_lines())
            wait_for(lambda: is_idle(server))


def test_what_the_server_is(http) -> None:
    told = http.get("/props").json()
    assert told["default_generation_settings"]["n_ctx"] == etude().resolved.context_tokens
    assert told["chat_template"] == etude().chat_template.source
    slots = http.get("/slots", params={"fail_on_no_slot": 1}).json()
    assert len(slots) == told["total_slots"] == 4
    assert not any(slot["is_processing"] for slot in slots)
    assert http.get("/health").json()["status"] == "ready"
    health = http.get("/health", params={"include_slots": "", "fail_on_no_slot": ""}).json()
    assert health == {"status": "ok", "slots_idle": 4, "slots_processing": 0, "slots": slots}


def test_tokens_as_llama_cpp_gives_them(http) -> None:
    ids = oracle().tokenizer.encode("x = 'é'", add_special_tokens=False)
    assert http.post("/tokenize", json={"content": "x = 'é'"}).json() == {"tokens": ids}
    pieces = http.post("/tokenize", json={"content": "x = 'é'", "with_pieces": True}).json()
    spelled = [one["piece"] for one in pieces["tokens"]]
    spelled = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in spelled)
    assert spelled.decode() == "x = 'é'"
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == "x = 'é'"
    for wrong in ({"content": "x", "prompt": "x"}, {"prompt": "x", "with_pieces": True}):
        assert http.post("/tokenize", json=wrong).status_code == 400


def test_keys_are_asked_for() -> None:
    with running(lambda _: etude(), api_keys=(KEY,)) as made:
        wait_until_ready(made)
        with httpx2.Client(base_url=made.url) as http:
            assert http.get("/props").status_code == http.get("/slots").status_code == 401
            assert http.post("/infill", json=VIM).status_code == 401
            key = {"Authorization": f"Bearer {KEY}"}
            assert http.get("/slots", headers=key).status_code == 200
