"""Spans of requests, as OpenTelemetry's own SDK exports them."""

from collections.abc import Iterator

import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from server.running import Scripted, running, scripted, wait_for, wait_until_ready
from soloist.errors import LaunchError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CHAT = {"messages": [{"role": "user", "content": "SECRET"}], "max_tokens": 9, "ignore_eos": True}
CONVENTION = {v for k, v in vars(gen_ai_attributes).items() if k.startswith("GEN_AI_")}


@pytest.fixture
def exporter(monkeypatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.fixture
def served(exporter):
    executor = Scripted(tokens_per_s=1000, read_s=0.01)
    with running(lambda _: scripted(executor), request_s=5) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20, headers=HEADERS) as http:
            yield http, executor, exporter


def spans(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
    """The request's span, once it has ended, and those below it."""
    wait_for(lambda: any(s.kind is SpanKind.SERVER for s in exporter.get_finished_spans()))
    found = exporter.get_finished_spans()
    (root,) = [s for s in found if s.kind is SpanKind.SERVER]
    below = [s for s in found if s is not root]
    assert all(s.parent.span_id == root.context.span_id for s in below)
    return root, {s.name: s for s in below}


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_the_engines_times_below(served) -> None:
    http, _, exporter = served
    ask = CHAT | {"temperature": 0.5, "seed": 3, "top_p": 0.9, "stop": "zzz"}
    reply = http.post("/v1/chat/completions", json=ask).json()
    root, below = spans(exporter)
    assert root.name == "chat etude-draft"
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    told = dict(root.attributes)
    assert set(told) <= CONVENTION
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.id"] == reply["id"]
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.request.stop_sequences"] == ("zzz",)
    assert told["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 9
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert "SECRET" not in str([s.to_json() for s in (root, *below.values())])
    assert set(below) == {"queue", "prefill", "decode"}
    timings = reply["timings"]
    assert seconds(below["queue"]) == pytest.approx(timings["queue_ms"] / 1e3, abs=1e-5)
    assert seconds(below["prefill"]) == pytest.approx(timings["prompt_ms"] / 1e3, abs=1e-5)
    assert seconds(below["decode"]) == pytest.approx(timings["predicted_ms"] / 1e3, abs=1e-5)
    assert root.start_time == below["queue"].start_time
    assert below["queue"].end_time == below["prefill"].start_time
    assert below["decode"].end_time <= root.end_time
    speed = below["decode"].attributes["soloist.decode.tokens_per_second"]
    assert speed == pytest.approx(timings["predicted_per_second"])


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("completions", {"prompt": ["a", "b"], "n": 2}, "text_completion etude-draft"),
        ("responses", {"input": "x", "model": "gpt"}, "chat gpt"),
        ("messages", {"messages": CHAT["messages"], "max_tokens": 3}, "chat etude-draft"),
    ],
)
def test_every_way_to_ask_is_traced(served, path, body, name) -> None:
    http, _, exporter = served
    if path == "responses":
        body = body | {"max_output_tokens": 3}
    reply = http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200
    root, below = spans(exporter)
    assert root.name == name
    assert root.attributes["gen_ai.response.id"] == reply.json()["id"]
    assert "decode" in below
    if path == "completions":
        assert root.attributes["gen_ai.request.choice.count"] == 4
        assert len(root.attributes["gen_ai.response.finish_reasons"]) == 4


def test_what_goes_wrong_is_an_error(served) -> None:
    http, executor, exporter = served
    executor.fault = LaunchError("the decode kernel", "it broke")
    http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    root, _ = spans(exporter)
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "unavailable"


def test_a_client_that_goes_away_is_an_error(served) -> None:
    http, executor, exporter = served
    executor.pace_s = 0.01
    ask = CHAT | {"stream": True, "max_tokens": 2000}
    with http.stream("POST", "/v1/chat/completions", json=ask) as reply:
        next(reply.iter_raw())
    root, below = spans(exporter)
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert "decode" in below


def test_nothing_happens_without_an_sdk() -> None:
    from soloist.server.tracing import CHAT as OPERATION
    from soloist.server.tracing import RequestTrace

    made = RequestTrace({}, OPERATION, "x", 0.0)
    assert not made._span.is_recording()
    made.asked("id", [], [])  # nothing is looked at
    made.close("error")
