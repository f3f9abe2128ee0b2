"""The official client drives every endpoint; replies are the engine's own answers."""

import re
import time
from dataclasses import replace

import httpx2 as httpx
import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.running import (
    CONFIG,
    Scripted,
    etude,
    is_idle,
    oracle,
    running,
    wait_for,
    wait_until_ready,
)
from server.values import MESSAGES
from soloist import engine
from soloist.kv.memory import kv_bytes_seen
from soloist.sampling import SamplingParams
from soloist.sampling.logprobs import TokenLogprobs, logprobs
from soloist.server import documentation
from soloist.server.app import ROUTES
from soloist.server.likelihood import offsets

PROMPT = "def fibonacci(n):\n"


def answer(prompt, **params) -> engine.Completion:
    *_, end = oracle().generate(prompt, SamplingParams(**params))
    return end


def chat_answer(messages=MESSAGES, **params) -> engine.Completion:
    return answer(etude().encode_chat(messages), **params)


def test_models(client) -> None:
    found = list(client.models.list())
    assert [m.id for m in found] == ["etude-draft", "gpt"]
    assert found[0].max_model_len == found[0].context_length == 2048
    assert found[0].default_max_tokens == 1024
    assert client.models.retrieve("gpt").owned_by == "soloist"
    assert (found[0].root, found[0].parent) == ("etude-draft", None)
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("other")


def test_an_adapter_is_told_with_its_model() -> None:
    real = etude()
    report = replace(real.report, adapter="more")
    made = engine.Engine(real.config, Scripted(), real.resolved, report.folder, report)
    with running(lambda _: made) as server:
        wait_until_ready(server)
        with httpx.Client(base_url=server.url, timeout=30) as http:
            for found in http.get("/v1/models").json()["data"]:
                assert found["id"] in CONFIG.names
                assert (found["root"], found["parent"]) == ("more", "etude-draft")
            (told, _) = http.get("/api/tags").json()["models"]
            assert told["details"]["parent_model"] == "etude-draft"
            asked = {"model": "gpt", "prompt": "a", "max_tokens": 1}
            assert http.post("/v1/completions", json=asked).json()["model"] == "gpt"


def test_a_completion_is_the_engines(client) -> None:
    wanted = answer(PROMPT, max_tokens=20, ignore_eos=True)
    ids = etude().tokenizer.encode(PROMPT)
    report, traffic = etude().report, etude().traffic
    for is_repeated in (False, True):
        reply = client.completions.create(
            model="gpt",
            prompt=PROMPT,
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert Completion.model_validate(reply.model_dump()), "every required field is there"
        assert reply.model == "gpt"
        assert reply.choices[0].text == wanted.text
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.prompt_tokens == len(ids)
        assert reply.usage.completion_tokens == 20
        assert reply.usage.total_tokens == len(ids) + 20
        timings = reply.timings
        assert timings["predicted_n"] == 20
        assert timings["prompt_n"] + timings["cache_n"] == len(ids)
        assert 0 < timings["ttft_ms"] < timings["total_ms"]
        assert timings["executor"] == "reference"
        assert timings["device"] == report.device_name
        # Drafts come from earlier answers, other tests' too; each accepted one saves a round.
        rounds = 19 - timings["draft_n_accepted"]
        assert not is_repeated or rounds < 19
        ends = [kv_bytes_seen(traffic.config, traffic.kv, len(ids) + n) for n in (1, 19)]
        moved = rounds * report.streamed_bytes + rounds * sum(ends) // 2
        assert timings["predicted_bytes"] == moved
        assert timings["mbu"] == pytest.approx(
            moved / timings["predicted_ms"] / 1e6 / report.bandwidth_gb_per_s
        )
        assert timings["bandwidth_gb_per_s"] == report.bandwidth_gb_per_s
        usage = reply.usage
        assert usage.mbu == timings["mbu"]
        assert usage.decode_tokens_per_second == timings["predicted_per_second"]
        assert usage.time_to_first_token == pytest.approx(timings["ttft_ms"] / 1e3)
        assert usage.queue_time + usage.prompt_time == pytest.approx(usage.time_to_first_token)
        assert usage.device == timings["device"]


def test_a_chat_is_the_engines(client) -> None:
    wanted = chat_answer(max_tokens=20)
    reply = client.chat.completions.create(
        model="etude-draft", messages=MESSAGES, max_completion_tokens=20, temperature=0
    )
    assert ChatCompletion.model_validate(reply.model_dump()), "every required field is there"
    assert reply.choices[0].message.content == wanted.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens == wanted.timings.prompt_tokens


def test_streams_are_the_same_text(client) -> None:
    wanted = answer(PROMPT, max_tokens=40, temperature=0.9, seed=4)
    stream = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=40, temperature=0.9, seed=4, stream=True
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == wanted.text
    assert [c.choices[0].finish_reason for c in chunks][-1] is not None
    assert not any(c.usage for c in chunks)
    assert chunks[-1].timings["predicted_n"] == len(wanted.token_ids)


def test_a_chat_streams_its_role_with_the_first_text_and_ends_with_usage(client) -> None:
    wanted = chat_answer(max_tokens=30)
    stream = client.chat.completions.create(
        model="gpt", messages=MESSAGES, max_tokens=30, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert all(ChatCompletionChunk.model_validate(c.model_dump()) for c in [*chunks, last])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content, "never a role alone"
    assert not any(c.choices[0].delta.role for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == []
    assert last.usage.completion_tokens == len(wanted.token_ids)
    assert last.usage.prompt_tokens == wanted.timings.prompt_tokens


def test_usage_in_every_chunk(client) -> None:
    stream = client.chat.completions.create(
        model="gpt", messages=MESSAGES, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    counts = [c.usage.completion_tokens for c in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_several_answers(client) -> None:
    alone = [chat_answer(max_tokens=16, temperature=1.0, seed=7 + i).text for i in range(3)]
    ask = {
        "model": "gpt", "messages": MESSAGES, "max_tokens": 16, "seed": 7, "temperature": 1, "n": 3
    }  # fmt: skip
    reply = client.chat.completions.create(**ask)
    assert [c.message.content for c in reply.choices] == alone
    assert [c.index for c in reply.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == alone


def test_several_prompts_as_texts_and_ids(client) -> None:
    prompts = ["import ", "class A:\n"]
    ids = [etude().tokenizer.encode(p) for p in prompts]
    wanted = [answer(p, max_tokens=8).text for p in prompts]
    for given in (prompts, ids):
        reply = client.completions.create(model="gpt", prompt=given, max_tokens=8, temperature=0)
        assert [c.text for c in reply.choices] == wanted
        assert reply.usage.prompt_tokens == sum(map(len, ids))
    one = client.completions.create(model="gpt", prompt=ids[1], max_tokens=8, temperature=0)
    assert one.choices[0].text == wanted[1]


def test_echo_and_default_length(client) -> None:
    ids = etude().tokenizer.encode(PROMPT)
    wanted = PROMPT + answer(PROMPT, max_tokens=16).text
    for given in (PROMPT, ids):
        reply = client.completions.create(model="gpt", prompt=given, temperature=0, echo=True)
        assert reply.choices[0].text == wanted
        stream = client.completions.create(
            model="gpt", prompt=given, temperature=0, echo=True, stream=True
        )
        assert "".join(c.choices[0].text for c in stream) == wanted


def scores_of(ids: list[int], top: int):
    """What the reference thinks of each token but the first, a row a token."""
    reference = oracle().model.reference
    cache = reference.new_cache(len(ids))
    logits = reference.forward(torch.tensor(ids), 0, cache, "all")
    return [logprobs(row, i, top) for row, i in zip(logits, ids[1:], strict=False)]


def named(shown: TokenLogprobs) -> dict[str, float]:
    return {etude().tokenizer.token_bytes(i).decode(errors="replace"): x for i, x in shown.top}


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("prompt", [PROMPT, "# Zürich – naïve 🙂 日本\n" * 9 + PROMPT])
def test_scores_of_a_prompt_come_before_those_of_its_answer(client, prompt: str, top: int) -> None:
    tokenizer = etude().tokenizer
    ids, wanted = tokenizer.encode(prompt), answer(prompt, max_tokens=6)
    ask = {
        "model": "gpt", "prompt": prompt, "temperature": 0, "max_tokens": 6, "echo": True,
        "logprobs": top,
    }  # fmt: skip
    (choice,) = client.completions.create(**ask).choices
    assert choice.text == prompt + wanted.text
    shown, made = choice.logprobs, list(wanted.token_ids)
    spelled = [tokenizer.token_bytes(i).decode(errors="replace") for i in ids + made]
    assert shown.tokens == spelled
    assert shown.token_logprobs[0] is shown.top_logprobs[0] is None
    scores = scores_of(ids + made, top)
    assert shown.token_logprobs[1:] == pytest.approx([x.chosen for x in scores], abs=1e-3)
    for told, score in zip(shown.top_logprobs[1:], scores, strict=True):
        assert told == pytest.approx(named(score), abs=1e-3)
    places = zip(shown.tokens, shown.text_offset, strict=True)
    assert all(choice.text.startswith(x, at) for x, at in places if "\ufffd" not in x)
    assert shown.text_offset == sorted(shown.text_offset)

    chunks = [c.choices[0] for c in client.completions.create(**ask, stream=True)]
    assert chunks[0].text.startswith(prompt)
    parts = [c.logprobs for c in chunks if c.logprobs is not None]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [y for x in parts for y in getattr(x, field)] == getattr(shown, field)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_alone_is_scored(client, is_stream: bool) -> None:
    ids = etude().tokenizer.encode(PROMPT)
    ask = {"model": "gpt", "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1}
    if is_stream:
        chunks = list(client.completions.create(**ask, prompt=PROMPT, stream=True))
        choice, end = chunks[0].choices[0], chunks[-1].choices[0]
    else:
        reply = client.completions.create(**ask, prompt=PROMPT)
        choice = end = reply.choices[0]
        assert reply.usage.completion_tokens == 0
        assert reply.usage.prompt_tokens == len(ids)
    assert choice.text == PROMPT
    assert end.finish_reason == "length"
    assert len(choice.logprobs.tokens) == len(ids)
    scores = [x.chosen for x in scores_of(ids, 1)]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-3)
    (one,) = client.completions.create(**ask, prompt=[ids[0]]).choices
    assert one.logprobs.token_logprobs == [None]


def test_scores_serve_an_evaluation_harness(client) -> None:
    """Several prompts of ids with a token behind each, as lm-evaluation-harness asks."""
    texts = [(PROMPT, "    return 1\n"), ("import ", "os\n")]
    prompts = [[etude().tokenizer.encode(x) for x in pair] for pair in texts]
    reply = client.completions.create(
        model="gpt", prompt=[a + b for a, b in prompts], temperature=0, max_tokens=1, logprobs=1,
        seed=1234, echo=True,
    )  # fmt: skip
    for choice, (context, continuation) in zip(reply.choices, prompts, strict=True):
        told = choice.logprobs.token_logprobs[len(context) : -1]
        ids = context + continuation
        scores = scores_of(ids, 1)[len(context) - 1 :]
        assert len(told) == len(continuation)
        assert sum(told) == pytest.approx(sum(x.chosen for x in scores), abs=1e-2)
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        assert [max(x, key=x.get) for x in tops] == [next(iter(named(x))) for x in scores]


def test_a_token_that_ends_a_scored_answer_is_scored_too(client) -> None:
    """Harnesses take what comes behind the prompt for one token each."""
    ids, (first, *_) = etude().tokenizer.encode(PROMPT), answer(PROMPT, max_tokens=1).token_ids
    (choice,) = client.completions.create(
        model="gpt", prompt=PROMPT, temperature=0, max_tokens=1, logprobs=0, echo=True,
        extra_body={"stop_token_ids": [first]},
    ).choices  # fmt: skip
    assert choice.text == PROMPT
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.token_logprobs) == len(ids) + 1


def test_tokens_that_an_echoed_text_does_not_hold_take_no_room() -> None:
    pieces = [b"<s>", b" Hello", b" w", b"\xc3", b"\xb6", b"rld"]
    assert offsets("Hello wörld", pieces) == [0, 0, 5, 7, 8, 8]


def test_several_scored_answers(client) -> None:
    ask = {
        "model": "gpt", "prompt": [PROMPT, "import "], "max_tokens": 5, "logprobs": 2, "seed": 3,
        "n": 2,
    }  # fmt: skip
    plain = client.completions.create(**ask).choices
    scored = client.completions.create(**ask, echo=True).choices
    lengths = [len(etude().tokenizer.encode(x)) for x in ask["prompt"] for _ in range(2)]
    for one, other, length in zip(plain, scored, lengths, strict=True):
        assert other.text.endswith(one.text)
        tail = other.logprobs.token_logprobs[length:]
        assert tail[: len(one.logprobs.tokens)] == pytest.approx(
            one.logprobs.token_logprobs, abs=1e-3
        )
    assert (
        scored[0].logprobs.token_logprobs[: lengths[0]]
        == (scored[1].logprobs.token_logprobs[: lengths[1]])
    )


def test_filling_in_the_middle(client) -> None:
    prefix, suffix = "def add(a, b):\n    ", "\n    return total\n"
    wanted = answer(etude().tokenizer.fim_prompt(prefix, suffix), max_tokens=10)
    reply = client.completions.create(
        model="gpt", prompt=prefix, suffix=suffix, max_tokens=10, temperature=0
    )
    assert reply.choices[0].text == wanted.text


def test_stop_strings_and_token_ids(client) -> None:
    text = answer(PROMPT, max_tokens=40, ignore_eos=True).text
    stop = text[10:13]
    reply = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop],
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    choice = reply.choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    assert choice.prompt_token_ids == etude().tokenizer.encode(PROMPT)
    assert reply.usage.completion_tokens == len(choice.token_ids)
    stream = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    streamed = [i for c in chunks for i in getattr(c.choices[0], "token_ids", ())]
    assert streamed == choice.token_ids


def test_every_sampling_field_reaches_the_engine(client) -> None:
    fields = {
        "top_k": 30, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 10,
        "stop_token_ids": [17, 44],
    }  # fmt: skip
    wanted = answer(
        PROMPT, max_tokens=24, temperature=0.8, top_p=0.9, seed=11, presence_penalty=0.3,
        frequency_penalty=-0.2, logit_bias={11: 2.5}, top_k=30, min_p=0.02, repetition_penalty=1.2,
        min_tokens=10, stop_token_ids=frozenset({17, 44}),
    )  # fmt: skip
    reply = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=24, temperature=0.8, top_p=0.9, seed=11,
        presence_penalty=0.3, frequency_penalty=-0.2, logit_bias={"11": 2.5},
        extra_body={**fields, "return_token_ids": True},
    )  # fmt: skip
    assert tuple(reply.choices[0].token_ids) == wanted.token_ids


def test_a_seed_beside_temperature_0_is_harmless(client) -> None:
    wanted = answer(PROMPT, max_tokens=8).text
    reply = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=8, temperature=0, seed=1, top_p=0.5,
        extra_body={"top_k": -1, "min_p": 0.1},
    )  # fmt: skip
    assert reply.choices[0].text == wanted


def test_log_probabilities_of_a_chat(client) -> None:
    ask = {
        "model": "gpt", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True,
        "top_logprobs": 3, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0]
    content = whole.logprobs.content
    assert b"".join(bytes(c.bytes) for c in content).decode() == whole.message.content
    assert len(content) == 8
    for entry in content:
        best, *others = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob)
        assert [t.logprob for t in others] == sorted((t.logprob for t in others), reverse=True)
        assert len(others) == 2
    streamed = [
        entry
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_log_probabilities_of_a_completion(client) -> None:
    ask = {
        "model": "gpt", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.completions.create(**ask).choices[0]
    shown = whole.logprobs
    assert "".join(shown.tokens) == whole.text
    for token, at, top, logprob in zip(
        shown.tokens, shown.text_offset, shown.top_logprobs, shown.token_logprobs, strict=True
    ):
        assert whole.text[at:].startswith(token)
        assert max(top.values()) == top[token] == logprob
    chunks = [c.choices[0].logprobs for c in client.completions.create(**ask, stream=True)]
    assert [t for c in chunks if c for t in c.tokens] == shown.tokens
    assert [t for c in chunks if c for t in c.text_offset] == shown.text_offset


def test_parts_of_text_and_the_developer_role(client) -> None:
    plain = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": x} for x in "ab"]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    wanted = chat_answer(plain, max_tokens=8).text
    reply = client.chat.completions.create(model="gpt", messages=parts, max_tokens=8, temperature=0)
    assert reply.choices[0].message.content == wanted


def test_tokens_there_and_back(http) -> None:
    made = http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert made["tokens"] == etude().tokenizer.encode(PROMPT)
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {
        "prompt": PROMPT, "content": PROMPT,
    }  # fmt: skip
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == etude().encode_chat(MESSAGES)


def test_a_chat_may_fill_the_context(client, server) -> None:
    with client.chat.completions.create(
        model="gpt", messages=MESSAGES, stream=True, temperature=0, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        (generation,) = server.host.running.values()
        (ticket,) = generation.requests
        assert len(ticket.prompt_ids) > 5
    wait_for(lambda: is_idle(server))


def test_a_client_that_closes_its_stream_ends_the_request(client, server) -> None:
    stream = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert not is_idle(server)
    stream.close()
    start = time.monotonic()
    wait_for(lambda: is_idle(server))
    assert time.monotonic() - start < 1


def test_a_plain_request_that_is_given_up_ends(client, server) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="gpt", prompt=PROMPT, max_tokens=1900, extra_body={"ignore_eos": True}
        )
    start = time.monotonic()
    wait_for(lambda: is_idle(server))
    assert time.monotonic() - start < 1


def test_delete_ends_a_request_and_its_client_is_told(client, server, http) -> None:
    stream = client.chat.completions.create(
        model="gpt", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    reply = http.delete(f"/v1/chat/completions/{first.id}")
    assert reply.json()["deleted"] is True
    with pytest.raises(openai.APIError, match="cancelled through the API"):
        list(stream)
    wait_for(lambda: is_idle(server))
    assert http.delete(f"/v1/chat/completions/{first.id}").status_code == 404


def test_metrics_count_the_engines_tokens(client, http, server) -> None:
    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return float(next(x for x in lines if x.startswith(name)).split()[-1])

    client.completions.create(model="gpt", prompt=PROMPT, max_tokens=3)
    before = value("soloist_generation_tokens_total")
    prompts = value("soloist_prompt_tokens_total")
    with_mbu = value("soloist_memory_bandwidth_utilisation_count")
    client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert value("soloist_generation_tokens_total") == before + 9
    assert value("soloist_memory_bandwidth_utilisation_count") == with_mbu + 1
    ids = etude().tokenizer.encode(PROMPT)
    assert value("soloist_prompt_tokens_total") == prompts + len(ids)
    wait_for(lambda: is_idle(server))
    assert value("soloist_requests_running") == 0
    assert value("soloist_requests_preempted_total") == 0
    assert value("soloist_requests_paused_total") == 0
    cached = value('soloist_prefix_tokens_cached{on="device"}')
    assert cached % 128 == 0
    assert value('soloist_prefix_tokens_kept{on="device"}') == cached
    assert value('soloist_prefix_tokens_total{to="host"}') == 0
    assert value('soloist_http_replies_total{path="/v1/completions",status="200"}') >= 2


def test_health_and_documentation(http) -> None:
    health = http.get("/health").json()
    assert health["status"] == "ready"
    assert health["device"] == etude().report.device_name
    assert documentation._openapi.cache_info().currsize, "it is made while the model is loaded"
    api = http.get("/openapi.json").json()
    fields = api["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "logprobs"} <= set(fields)
    documented = {(path, method.upper()) for path, one in api["paths"].items() for method in one}
    left_out = {"/docs", "/openapi.json", "/playground/{name}"}
    for route in ROUTES:
        path = re.sub(r":path}", "}", route.path)
        for method in route.methods - {"HEAD"}:
            assert path in left_out or (path, method) in documented
    page = http.get("/docs").text
    assert "/v1/chat/completions" in page
    assert "http" not in page.replace("text/html", ""), "it loads nothing from elsewhere"


COMPLETION = ("temperature", "top_p", "seed", "n", "logprobs", "min_tokens")
LLAMA = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed")


@pytest.mark.parametrize(
    ("path", "schema", "within", "known"),
    [
        ("/v1/completions", "CompletionRequest", None, COMPLETION),
        ("/completion", "LlamaCppRequest", None, (*LLAMA, "n_predict", "n_indent")),
        ("/api/generate", "Options", "options", (*LLAMA, "num_predict", "num_ctx")),
    ],
)
def test_documented_bounds_of_numbers_are_those_of_the_server(
    http, path, schema, within, known
) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    too_low = {}
    for name, field in schemas[schema]["properties"].items():
        for kind in (field, *field.get("anyOf", ())):
            assert not {"ge", "gt", "le", "lt"} & set(kind), f"{name}: no words of JSON schema"
            if "exclusiveMinimum" in kind:
                too_low[name] = kind["exclusiveMinimum"]
            elif "minimum" in kind:
                too_low[name] = kind["minimum"] - 1
    assert set(known) <= set(too_low)
    for name, value in too_low.items():
        given = {within: {name: value}} if within else {name: value}
        reply = http.post(path, json={"model": "gpt", "prompt": "x"} | given)
        assert reply.status_code == 400, name
        error = reply.json()["error"]
        assert error["param"] == name if within is None else name in error


def test_documented_operations_have_names_and_errors(http) -> None:
    api = http.get("/openapi.json").json()
    operations = [one for path in api["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert "post_v1_chat_completions" in names
    for path, words in (("/v1/messages", {"type", "error"}), ("/v1/responses", {"error"})):
        refused = http.post(path, json={"colour": 1}).json()
        (content,) = api["paths"][path]["post"]["responses"]["4XX"]["content"].values()
        schema = api["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        assert set(refused) == set(schema["required"]) == words
        assert set(refused["error"]) == set(schema["properties"]["error"]["required"])


def test_a_second_turn_reads_only_what_is_new(client) -> None:
    begun = "".join(f"x_{i} = {i}\n" for i in range(90))
    first = {"role": "user", "content": begun}
    ask = {"model": "gpt", "max_tokens": 8, "temperature": 0}
    before = client.chat.completions.create(messages=[first], **ask)
    assert before.usage.prompt_tokens_details.cached_tokens == 0
    turn = [first, {"role": "assistant", "content": "y = 1"}, {"role": "user", "content": "more"}]
    after = client.chat.completions.create(messages=turn, **ask)
    cached = after.usage.prompt_tokens_details.cached_tokens
    assert cached == before.usage.prompt_tokens // 128 * 128 > 0
    assert after.timings["cache_n"] == cached
    assert after.timings["prompt_n"] == after.usage.prompt_tokens - cached
    assert after.choices[0].message.content == chat_answer(turn, max_tokens=8).text
