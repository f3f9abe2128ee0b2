"""A span for each request, with the engine's times below it; nothing where no SDK is set up.

Names follow OpenTelemetry's conventions for generative AI. No text is recorded.
"""

import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from soloist import __version__
from soloist.engine import Completion
from soloist.sampling import SamplingParams

# One of the conventions' names for what is done.
CHAT, TEXT = "chat", "text_completion"

_PROVIDER = "soloist"


class RequestTrace:
    """The span of one request.

    Args:
        headers: of the request; a `traceparent` among them makes the span part of that trace.
        operation: `CHAT` or `TEXT`.
        model: its name, as the client gave it.
        accepted: when the request came, by `time.perf_counter`.
    """

    def __init__(
        self, headers: Mapping[str, str], operation: str, model: str, accepted: float
    ) -> None:
        # From the engine's clock to the one that spans have.
        self._epoch_s = time.time() - time.perf_counter() + accepted
        self._finish_reasons: list[str] = []
        self._new_tokens = self._cached_tokens = 0
        self._tracer = trace.get_tracer("soloist.server", __version__)
        self._span: Span = self._tracer.start_span(
            f"{operation} {model}",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
            },
            start_time=self._ns(0),
        )

    def asked(
        self, request_id: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> None:
        """What is asked of the engine: one prompt and its parameters for each answer."""
        if not self._span.is_recording():
            return
        first = params[0]
        one_of_each = {id(prompt): len(prompt) for prompt in prompts}
        given: dict[str, AttributeValue | None] = {
            "gen_ai.response.id": request_id,
            "gen_ai.usage.input_tokens": sum(one_of_each.values()),
            "gen_ai.request.choice.count": len(params) if len(params) > 1 else None,
            "gen_ai.request.max_tokens": first.max_tokens,
            "gen_ai.request.temperature": first.temperature,
            "gen_ai.request.top_p": first.top_p,
            "gen_ai.request.top_k": first.top_k,
            "gen_ai.request.seed": first.seed,
            "gen_ai.request.frequency_penalty": first.frequency_penalty,
            "gen_ai.request.presence_penalty": first.presence_penalty,
            "gen_ai.request.stop_sequences": list(first.stop) or None,
        }
        self._span.set_attributes({k: v for k, v in given.items() if v is not None})

    def ended(self, end: Completion) -> None:
        """One answer is complete, or was cut."""
        if not self._span.is_recording():
            return
        t = end.timings
        self._finish_reasons.append(end.finish_reason)
        self._new_tokens += t.new_tokens
        self._cached_tokens += t.cached_tokens
        self._below("queue", 0, t.queue_s, {})
        if not t.new_tokens:
            return
        cached: dict[str, AttributeValue] = {
            "gen_ai.usage.cache_read.input_tokens": t.cached_tokens
        }
        self._below("prefill", t.queue_s, t.ttft_s, cached)
        speed = t.decode_tokens_per_s
        decoded: dict[str, AttributeValue] = {"gen_ai.usage.output_tokens": t.new_tokens}
        if speed is not None:
            decoded["soloist.decode.tokens_per_second"] = speed
        self._below("decode", t.ttft_s, t.ttft_s + t.decode_s, decoded)

    def close(self, error: str | None = None) -> None:
        """The request has ended.

        Args:
            error: a word for what went wrong, if anything did.
        """
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": self._finish_reasons,
                "gen_ai.usage.output_tokens": self._new_tokens,
                "gen_ai.usage.cache_read.input_tokens": self._cached_tokens,
            }
        )
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _below(
        self, name: str, start_s: float, end_s: float, told: Mapping[str, AttributeValue]
    ) -> None:
        context = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(name, context, attributes=told, start_time=self._ns(start_s))
        span.end(self._ns(end_s))

    def _ns(self, after_s: float) -> int:
        return int((self._epoch_s + after_s) * 1e9)
