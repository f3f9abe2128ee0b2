"""Predicted outputs over HTTP: the same answers, counted as OpenAI counts them."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
CHAT = {
    "model": "gpt", "messages": MESSAGES, "max_tokens": 80, "temperature": 0, "ignore_eos": True,
}  # fmt: skip


def answered(http, **more):
    reply = http.post("/v1/chat/completions", json=CHAT | more)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["choices"][0]["message"]["content"], body


def predicted(content) -> dict[str, object]:
    return {"type": "content", "content": content}


def test_a_right_prediction_gives_the_same_answer_in_fewer_steps(http) -> None:
    text, _ = answered(http)
    again, body = answered(http, prediction=predicted(text))
    assert again == text
    details, timings = body["usage"]["completion_tokens_details"], body["timings"]
    assert details["accepted_prediction_tokens"] > 50
    assert details["accepted_prediction_tokens"] <= details["drafted_tokens"]
    assert timings["draft_n_accepted"] == details["drafted_tokens"]
    assert timings["draft_n"] >= timings["draft_n_accepted"]
    assert timings["tokens_per_step"] > 4


def test_parts_are_one_text(http) -> None:
    text, _ = answered(http)
    parts = [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]
    again, body = answered(http, prediction=predicted(parts))
    assert again == text
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 50


def test_a_wrong_prediction_changes_nothing_and_is_told(http) -> None:
    text, _ = answered(http)
    again, body = answered(http, prediction=predicted("Rain fell on the hills all night. " * 20))
    assert again == text
    assert body["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_the_client_of_openai_reads_the_counts(client) -> None:
    def ask(**more):
        return client.chat.completions.create(
            model="gpt", messages=MESSAGES, max_tokens=60, temperature=0, **more
        )

    text = ask().choices[0].message.content
    told = ask(prediction=predicted(text))
    assert told.choices[0].message.content == text
    assert told.usage.completion_tokens_details.accepted_prediction_tokens > 10


def test_drafted_tokens_are_counted_as_they_come(http) -> None:
    text, _ = answered(http)
    counts = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    body = CHAT | counts | {"prediction": predicted(text)}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [x.removeprefix("data: ") for x in reply.iter_lines() if x.startswith("data: {")]
    seen = [json.loads(line)["usage"]["completion_tokens_details"] for line in lines]
    drafted = [details["drafted_tokens"] for details in seen]
    assert drafted == sorted(drafted)
    assert 50 < drafted[-1] < 80


def test_metrics_have_the_names_of_vllm(http) -> None:
    def count(name: str, **labels: str) -> float:
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
        family = families[f"vllm:spec_decode_{name}"]
        assert family.type == "counter"
        return sum(s.value for s in family.samples if labels.items() <= s.labels.items())

    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    text, _ = answered(http)
    before = [count(name) for name in names]
    _, body = answered(http, prediction=predicted(text))
    drafts, drafted, accepted = (count(name) - was for name, was in zip(names, before, strict=True))
    assert drafted == body["timings"]["draft_n"]
    assert accepted == body["timings"]["draft_n_accepted"]
    assert 0 < drafts <= accepted
    assert count("num_accepted_tokens_per_pos") == count("num_accepted_tokens")
    assert count("num_accepted_tokens_per_pos", position="0") >= accepted / 7


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prediction": predicted("a"), "n": 2}, "only with n 1"),
        ({"prediction": "a text"}, "prediction"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "guess", "content": "a"}}, "prediction.type"),
        ({"prediction": predicted(5)}, "prediction.content"),
        ({"prediction": predicted([{"type": "image_url", "image_url": {}}])}, "prediction"),
        ({"prediction": predicted("word " * 400_000)}, "the prediction has"),
    ],
)
def test_bad_predictions_are_refused(http, fields, words) -> None:
    reply = http.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert words in error["message"] or words in (error["param"] or ""), error
