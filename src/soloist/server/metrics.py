"""What Prometheus reads at /metrics; times and tokens are the engine's own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from soloist.engine import Completion
from soloist.engine.loop import EngineLoop
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.saving import SavedTokens
from soloist.megakernel.limits import MAX_QUERIES
from soloist.speculation import Tally

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
        self._gap = histogram(
            "longest_gap_seconds", "Longest time between two tokens of an answer.", _SECONDS
        )
        self._mbu = histogram("memory_bandwidth_utilisation", "Of decoding, where known.", _SHARES)
        self._total = histogram("request_seconds", "From acceptance to end.", _SECONDS)
        self._drafts = Drafts()

    def watch(self, loop: EngineLoop, model: str) -> None:
        """Show how busy the engine is, and under vLLM's names with the name of the model."""
        self.registry.register(_Load(loop))
        self.registry.register(_PoolMember(loop, model))
        self.registry.register(_Speculation(self._drafts, model))

    def count(self, completion: Completion, bandwidth_gb_per_s: float | None) -> None:
        """A request has ended, on a device that reads so fast."""
        t = completion.timings
        self._requests.labels(completion.finish_reason).inc()
        self._prompt_tokens.inc(t.prompt_tokens)
        self._cached_tokens.inc(t.cached_tokens)
        self._new_tokens.inc(t.new_tokens)
        self._drafts.count(t.drafts)
        self._queue.observe(t.queue_s)
        self._total.observe(t.total_s)
        if t.new_tokens:
            self._ttft.observe(t.ttft_s)
        if t.new_tokens > 1:
            self._token.observe(t.decode_s / (t.new_tokens - 1))
            self._gap.observe(t.longest_gap_s)
        if (mbu := t.mbu(bandwidth_gb_per_s)) is not None:
            self._mbu.observe(mbu)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)


class Drafts:
    """What became of drafts since the server began."""

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = 0
        self.by_place = [0] * (MAX_QUERIES - 1)

    def count(self, tally: Tally) -> None:
        """Add those of a request that ended."""
        self.rounds += tally.rounds
        self.drafted += tally.drafted
        self.accepted += tally.accepted
        for place, count in enumerate(tally.by_place):
            self.by_place[place] += count


class _Load(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> list[Metric]:
        """How many requests there are, their progress, and what the KV cache holds, now."""
        load, cached, pages = self._loop.load, self._loop.cached, self._loop.pages
        age_s, saved = self._loop.progress.age_s, self._loop.saved

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
            *([] if saved is None else _saved(saved)),
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


def _saved(saved: SavedTokens) -> list[Metric]:
    """What became of cached prompts in the folder of --cache-dir."""
    tokens = CounterMetricFamily(
        "soloist_prefix_disk_tokens",
        "Prefix cache on disk: saved to it, loaded from it, dropped instead of saved.",
        labels=["what"],
    )
    for what, count in (
        ("saved", saved.saved), ("loaded", saved.loaded), ("dropped", saved.dropped)
    ):  # fmt: skip
        tokens.add_metric([what], count)
    files = CounterMetricFamily(
        "soloist_prefix_disk_files_deleted",
        "Files of the prefix cache on disk that were deleted: damaged, evicted for others.",
        labels=["why"],
    )
    files.add_metric(["damaged"], saved.damaged)
    files.add_metric(["evicted"], saved.evicted)
    held = GaugeMetricFamily("soloist_prefix_disk_bytes", "Of all files there.", saved.num_bytes)
    bound = GaugeMetricFamily("soloist_prefix_disk_bytes_limit", "Its bound.", saved.most_bytes)
    return [tokens, files, held, bound]


class _Speculation(Collector):
    """What became of drafts, under vLLM's names."""

    def __init__(self, drafts: Drafts, model: str) -> None:
        self._drafts, self._model = drafts, model

    def collect(self) -> list[Metric]:
        """Counters of requests that ended."""
        drafts = self._drafts

        def counter(name: str, told: str, *labels: str) -> CounterMetricFamily:
            labels = ("model_name", *labels)
            return CounterMetricFamily(f"vllm:spec_decode_{name}", told, labels=labels)

        found = []
        for name, told, value in (
            ("num_drafts", "Steps that checked a draft.", drafts.rounds),
            ("num_draft_tokens", "Tokens that were drafted.", drafts.drafted),
            ("num_accepted_tokens", "Of these, tokens of answers.", drafts.accepted),
        ):
            family = counter(name, told)
            family.add_metric([self._model], value)
            found.append(family)
        by_place = counter(
            "num_accepted_tokens_per_pos", "Accepted tokens by place in a draft.", "position"
        )
        for place, value in enumerate(drafts.by_place):
            by_place.add_metric([self._model, str(place)], value)
        return [*found, by_place]


class _PoolMember(Collector):
    """What an endpoint picker chooses servers by, and hits on disk, under vLLM's names.

    Names, types and meanings are those of the model server protocol of the Gateway API Inference
    Extension (docs/proposals/003-model-server-protocol there), which llm-d reads as well.
    """

    def __init__(self, loop: EngineLoop, model: str) -> None:
        self._loop, self._model = loop, model

    def collect(self) -> list[Metric]:
        """Requests that wait and run, the KV cache's use and size, and prompts found on disk."""
        load, pages, saved = self._loop.load, self._loop.pages, self._loop.saved
        used = (pages.total - pages.free) / pages.total if pages.total else 0.0

        def gauge(name: str, told: str, value: float, **more: str) -> Metric:
            labels = {"model_name": self._model, **more}
            family = GaugeMetricFamily(f"vllm:{name}", told, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        external = []
        if saved is not None:
            for name, told, value in (
                ("queries", "Prompt tokens that were looked for on disk.", saved.asked),
                ("hits", "Of these, tokens that were found.", saved.loaded),
            ):
                family = CounterMetricFamily(
                    f"vllm:external_prefix_cache_{name}", told, labels=["model_name"]
                )
                family.add_metric([self._model], value)
                external.append(family)
        return [
            *external,
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
