"""What Prometheus reads at /metrics; times and tokens are the engine's own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from soloist.engine import Completion, EngineLoop
from soloist.kv.layout import PAGE_POSITIONS

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
)  # fmt: skip
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"soloist_{name}", told, labels, registry=self.registry)

        def histogram(name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"soloist_{name}", told, buckets=buckets, registry=self.registry)

        self.replies = counter("http_replies", "HTTP replies.", "path", "status")
        self._requests = counter("requests", "Requests that ended.", "finish_reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._new_tokens = counter("generation_tokens", "Tokens generated.")
        self._queue = histogram("queue_time_seconds", "From acceptance to start.", _SECONDS)
        self._ttft = histogram(
            "time_to_first_token_seconds", "From acceptance to first token.", _SECONDS
        )
        self._token = histogram(
            "time_per_output_token_seconds", "Decode time per token.", _TOKEN_SECONDS
        )
        self._mbu = histogram("memory_bandwidth_utilisation", "Of decoding, where known.", _SHARES)
        self._total = histogram("request_seconds", "From acceptance to end.", _SECONDS)

    def watch(self, loop: EngineLoop, model: str) -> None:
        """Show how busy the engine is, and under vLLM's names with the name of the model."""
        self.registry.register(_Load(loop))
        self.registry.register(_PoolMember(loop, model))

    def count(self, completion: Completion, bandwidth_gb_per_s: float | None) -> None:
        """A request has ended, on a device that reads so fast."""
        t = completion.timings
        self._requests.labels(completion.finish_reason).inc()
        self._prompt_tokens.inc(t.prompt_tokens)
        self._cached_tokens.inc(t.cached_tokens)
        self._new_tokens.inc(t.new_tokens)
        self._queue.observe(t.queue_s)
        self._total.observe(t.total_s)
        if t.new_tokens:
            self._ttft.observe(t.ttft_s)
        if t.new_tokens > 1:
            self._token.observe(t.decode_s / (t.new_tokens - 1))
        if (mbu := t.mbu(bandwidth_gb_per_s)) is not None:
            self._mbu.observe(mbu)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)


class _Load(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> list[Metric]:
        """How many requests there are, their progress, and what the KV cache holds, now."""
        load, cached, pages = self._loop.load, self._loop.cached, self._loop.pages
        age_s = self._loop.progress.age_s

        def gauge(name: str, told: str, value: float) -> Metric:
            return GaugeMetricFamily(f"soloist_{name}", told, value)

        preemptions = [
            CounterMetricFamily(f"soloist_requests_{name}", told, load.num_preemptions)
            for name, told in (
                ("preempted", "Pages freed for others because the KV cache was full."),
                ("paused", "The former name of soloist_requests_preempted."),
            )
        ]
        moved = CounterMetricFamily(
            "soloist_prefix_tokens",
            "Prefix cache: offloaded to the host, fetched to the device, evicted to nowhere.",
            labels=["to"],
        )
        for to, tokens in (
            ("host", cached.offloaded), ("device", cached.fetched), ("nowhere", cached.evicted)
        ):  # fmt: skip
            moved.add_metric([to], tokens)
        held = [
            GaugeMetricFamily(f"soloist_prefix_tokens_{name}", told, labels=["on"])
            for name, told in (
                ("cached", "In the prefix cache."),
                ("kept", "The former name of soloist_prefix_tokens_cached."),
            )
        ]
        for family in held:
            family.add_metric(["device"], cached.on_device)
            family.add_metric(["host"], cached.on_host)
        return [
            *preemptions,
            moved,
            *held,
            gauge("requests_running", "In prefill or decode.", load.num_running),
            gauge("requests_waiting", "In the queue.", load.num_waiting),
            gauge("kv_pages", "Pages of the KV cache, 64 positions each.", pages.total),
            gauge(
                "kv_pages_free",
                "Pages that a request could get now, unused prefix cache included.",
                pages.free,
            ),
            gauge("last_step_age_seconds", "Since the last progress; 0 while idle.", age_s),
        ]


class _PoolMember(Collector):
    """The gauges by which an endpoint picker chooses among servers, under vLLM's names.

    Names, types and meanings are those of the model server protocol of the Gateway API Inference
    Extension (docs/proposals/003-model-server-protocol there), which llm-d reads as well.
    """

    def __init__(self, loop: EngineLoop, model: str) -> None:
        self._loop, self._model = loop, model

    def collect(self) -> list[Metric]:
        """Requests that wait and run, the share of the KV cache in use, and the cache's size."""
        load, pages = self._loop.load, self._loop.pages
        used = (pages.total - pages.free) / pages.total if pages.total else 0.0

        def gauge(name: str, told: str, value: float, **more: str) -> Metric:
            labels = {"model_name": self._model, **more}
            family = GaugeMetricFamily(f"vllm:{name}", told, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        return [
            gauge("num_requests_waiting", "soloist_requests_waiting.", load.num_waiting),
            gauge("num_requests_running", "soloist_requests_running.", load.num_running),
            gauge(
                "kv_cache_usage_perc",
                "Share of the KV cache that running requests hold, 0 to 1.",
                used,
            ),
            gauge(
                "cache_config_info",
                "Positions in a page of the KV cache, and pages; the value is 1.",
                1.0,
                block_size=str(PAGE_POSITIONS),
                num_gpu_blocks=str(pages.total),
            ),
        ]
