"""The rows of result files: what is measured, its unit, and what judges and repeats it. Pure.

Descriptions of fields are also those of `benchmarks/README.md`, which is written from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Literal

# Whether a prompt, or its beginning, was read before.
Prefix = Literal["cold", "warm"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over runs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], digits: int = 2) -> "Spread":
        """Summarise `values`, rounded for reading."""
        return cls(
            round(median(values), digits), round(min(values), digits), round(max(values), digits)
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of many single times; each is the least value that so many of them do not exceed.

    Attributes:
        p50, p90, p99, max: of all of them.
        min, p10, p25, p75: the rest of the distribution; older files lack them.
    """

    p50: float
    p90: float
    p99: float
    max: float
    min: float | None = None
    p10: float | None = None
    p25: float | None = None
    p75: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], digits: int = 3) -> "Percentiles":
        """Summarise `values`, at least one, rounded for reading."""
        ordered = sorted(values)
        ranks = [
            max(0, ceil(share * len(ordered)) - 1)
            for share in (0.5, 0.9, 0.99, 1, 0, 0.1, 0.25, 0.75)
        ]
        return cls(*(round(ordered[rank], digits) for rank in ranks))


@dataclass(frozen=True, slots=True)
class Clocks:
    """What NVML told of the GPU while a row was measured.

    Attributes:
        sm_mhz, memory_mhz: clocks, over readings.
        temperature_c: of the GPU, in degrees Celsius.
        power_w: drawn by the board, in watts.
        throttling: why clocks were held down in any reading; empty where they were not.
        readings: taken, some tens a second, between runs as well.
    """

    sm_mhz: Spread
    memory_mhz: Spread
    temperature_c: Spread
    power_w: Spread
    throttling: tuple[str, ...]
    readings: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One measured configuration of one engine.

    Attributes:
        engine: who was measured, with its version and mode.
        shape: name of the model.
        device: name of the processor, with cores in use.
        gpus: how many; 0 on a CPU.
        precision: of weights and KV cache.
        prompt_tokens, new_tokens: per run.
        columns: (sequence, position) pairs per decode step, of all sequences together.
        runs: timed runs after a warm-up.
        ttft_ms: request accepted → first token.
        decode_tokens_per_s: (N - 1) / (time of last - time of first token); with several columns,
            that of steps times columns.
        streamed_bytes_per_token: weights that a step has to read, and KV at the middle of the run.
        bandwidth_gb_per_s: measured read bandwidth of this device, in this run.
        mbu: memory-bandwidth utilisation, streamed bytes · decode steps a second / bandwidth.
        speculation: whether tokens were drafted.
        output_ids_sha256: hash of the tokens made, so that runs can be compared.
        versions: of Python and the libraries that matter.
        commit: of the source tree; '+changes' if it was modified.
        command: as typed.
        date: UTC.
        sequences: separate ones that are decoded side by side.
        start_position: of the first decode step; where it is not the end of the prompt, the KV
            cache before it holds random values.
        bandwidth_method: how the bandwidth was measured.
        bench: 'decode'; older files lack it.
        token_ms: times between tokens of all runs, as the caller sees them come.
        clocks: of the GPU meanwhile; None where nobody tells.
        others_cores: that other processes kept busy meanwhile, time that a host took from a virtual
            machine included; the process itself and its children are no others. Older files lack
            it.
        busy_processes: started beside the measurement; each only counts, and is no other.
    """

    engine: str
    shape: str
    device: str
    gpus: int
    precision: str
    prompt_tokens: int
    new_tokens: int
    columns: int
    runs: int
    ttft_ms: Spread
    decode_tokens_per_s: Spread
    streamed_bytes_per_token: int
    bandwidth_gb_per_s: float
    mbu: float
    speculation: bool
    output_ids_sha256: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    sequences: int = 1
    start_position: int | None = None
    bandwidth_method: str = ""
    bench: str = "decode"
    token_ms: Percentiles | None = None
    clocks: Clocks | None = None
    others_cores: float | None = None
    busy_processes: int = 0


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """How fast one engine reads a prompt of one length.

    Attributes:
        bench: 'prefill'.
        engine, shape, device, gpus, precision: as in `DecodeRow`.
        prompt_tokens: length of the prompt.
        prefix: 'cold' where nothing of it was kept, 'warm' where the same prompt came before.
        cached_tokens: of them, kept from before and not read again; median.
        runs: timed runs after a warm-up.
        ttft_ms: token ids given → first token chosen.
        prompt_tokens_per_s: tokens that were read / time to first token.
        clocks: as in `DecodeRow`.
        versions, commit, command, date: as in `DecodeRow`.
        others_cores, busy_processes: as in `DecodeRow`.
    """

    bench: str
    engine: str
    shape: str
    device: str
    gpus: int
    precision: str
    prompt_tokens: int
    prefix: str
    cached_tokens: int
    runs: int
    ttft_ms: Spread
    prompt_tokens_per_s: Spread
    clocks: Clocks | None
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    others_cores: float | None = None
    busy_processes: int = 0


@dataclass(frozen=True, slots=True)
class StartupRow:
    """How long `soloist run` takes to its first token, in a fresh process.

    Attributes:
        bench: 'startup'.
        shape: name of the model.
        device: name of the processor, with cores in use.
        executor: 'decode kernel' or 'reference'.
        precision: of weights and KV cache.
        kernel_cache: 'warm', with all kernels compiled before, or 'cold', with none.
        runs: processes timed after one that was not, which read all files.
        total_s: from starting the process to its first token.
        weights_s: of them, reading weights, beside imports where a GPU is used.
        kernels_s: of them, compiling kernels.
        rest_s: of them, all else: interpreter, libraries, GPU, packing, tokenizer, prompt.
        kernels_built: kernels compiled.
        versions, commit, command, date: as in `DecodeRow`.
        clocks: as in `DecodeRow`.
        others_cores: as in `DecodeRow`.
    """

    bench: str
    shape: str
    device: str
    executor: str
    precision: str
    kernel_cache: str
    runs: int
    total_s: Spread
    weights_s: Spread
    kernels_s: Spread
    rest_s: Spread
    kernels_built: int
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    clocks: Clocks | None = None
    others_cores: float | None = None


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """How far one executor's logits are from fp32 arithmetic on the same weights.

    Attributes:
        bench: 'accuracy'.
        engine: who was measured.
        shape: name of the model.
        device: name of the processor, with cores in use.
        precision: of weights and KV cache.
        positions: teacher-forced ones of one text.
        text: what it is.
        mean_kl, max_kl: KL divergence of its distributions from fp32's, in nats.
        nll: mean negative log-likelihood of the text, in nats a token.
        nll_difference: that minus fp32's.
        nll_standard_error: of this difference, over positions.
        top_1_agreement: share of positions at which both have the same best token.
        same_bits: ways of making the logits that gave the same bits as the first.
        repeats: launches of 64 tokens that gave the same tokens and last logits each time.
        versions, commit, command, date: as in `DecodeRow`.
    """

    bench: str
    engine: str
    shape: str
    device: str
    precision: str
    positions: int
    text: str
    mean_kl: float
    max_kl: float
    nll: float
    nll_difference: float
    nll_standard_error: float
    top_1_agreement: float
    same_bits: tuple[str, ...]
    repeats: int
    versions: dict[str, str]
    commit: str
    command: str
    date: str


@dataclass(frozen=True, slots=True)
class ServeRow:
    """What a client saw of an OpenAI-compatible server, one request at a time.

    Attributes:
        bench: 'serve'.
        engine: name given to it, or its address.
        url, api: where it was asked: 'chat' or 'completions'.
        shape: the model, as the server calls it.
        prefix: 'warm' where each run had the same prompt, 'cold' where each began differently.
        asked_prompt_tokens: wanted length of the prompt; None for a given text.
        prompt_tokens: the length by usage, template included, median; None without usage.
        cached_tokens: of them, found in the server's cache; None where it does not tell.
        max_tokens: most new tokens.
        new_tokens: made, median; None where they are not counted.
        runs: timed runs after a warm-up.
        counting: how tokens were counted, by the server in every case.
        ttft_ms: request sent → first token or tokens; with usage at the end only, first text, but
            not before the end of a request for one token.
        first_tokens: so many came at once then, median; None where it is unknown.
        decode_tokens_per_s: (N_last - N_first) / (t_last - t_first), counted at these instants;
            with usage at the end only, that of a long and a short request, each from its start.
        no_decode_speed: why there is none; None where there is.
        token_ms: times of single tokens of all runs: each one's share of the gap before it.
        gap_ms: between instants at which tokens came.
        text_sha256: hashes of the texts made, where the prompt was the same.
        fields: beyond OpenAI's, that the server took.
        versions, commit, command, date: as in `DecodeRow`.
        server_tokens_per_s: decode speed by the server's own clock (`timings`), where it tells.
        streamed_bytes_per_token: as in `DecodeRow`; from the configuration that was given.
        bandwidth_gb_per_s: of all its GPUs, from the result file that was given for one, or by the
            server's timings.
        mbu: as in `DecodeRow`, at one token a step: a server that speculates may be above 1.
        mbu_by: 'what was given', or 'the server', whose timings told it; None without.
    """

    bench: str
    engine: str
    url: str
    api: str
    shape: str
    prefix: str
    asked_prompt_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    max_tokens: int
    new_tokens: int | None
    runs: int
    counting: str
    ttft_ms: Spread
    first_tokens: int | None
    decode_tokens_per_s: Spread | None
    no_decode_speed: str | None
    token_ms: Percentiles | None
    gap_ms: Percentiles | None
    text_sha256: str
    fields: tuple[str, ...]
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    server_tokens_per_s: Spread | None = None
    streamed_bytes_per_token: int | None = None
    bandwidth_gb_per_s: float | None = None
    mbu: float | None = None
    mbu_by: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of an agent's loop, medians over loops.

    Attributes:
        prompt_tokens, cached_tokens, new_tokens: by usage; None where the server does not tell.
        step_ms: request sent → end of the answer.
        ttft_ms: request sent → first token; None as in `AgentRow`.
        decode_tokens_per_s: as in `ServeRow`; None as in `AgentRow`.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    new_tokens: int | None
    step_ms: float
    ttft_ms: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class AgentRow:
    """What an agent's loop waits for: steps over a context that grows by answers and tool results.

    Attributes:
        bench: 'agent'.
        engine, url, api, shape: as in `ServeRow`.
        turns: steps of a loop.
        asked_prompt_tokens: length of the first prompt, by about four characters a token.
        tool_tokens: so much a tool's result adds to the next prompt, likewise.
        max_tokens: of an answer.
        runs: loops that count, after one that does not; each begins with another first line.
        counting: how tokens are counted, as in `ServeRow`.
        loop_s: all steps of a loop, without the time between them.
        step_ms: of all steps of all loops: request sent → end of the answer.
        mean_step_ms: of the same, their mean.
        ttft_ms: of the same; None where tokens are not counted on their way.
        decode_tokens_per_s: medians of loops; None where a step has none, or tokens are not counted
            on their way.
        by_turn: each step of the loop.
        machine_cost_per_step: mean_step_ms / 1000 · price_per_hour / 3600 / utilisation.
        price_per_hour, utilisation: as given.
        api_cost_per_step: of the same tokens by api_prices, mean; None where they are not counted.
        api_prices: as given, for a million prompt, cached and new tokens.
        fields: beyond OpenAI's, that the server took.
        versions, commit, command, date: as in `DecodeRow`.
    """

    bench: str
    engine: str
    url: str
    api: str
    shape: str
    turns: int
    asked_prompt_tokens: int
    tool_tokens: int
    max_tokens: int
    runs: int
    counting: str
    loop_s: Spread
    step_ms: Percentiles
    mean_step_ms: float
    ttft_ms: Percentiles | None
    decode_tokens_per_s: Spread | None
    by_turn: tuple[Turn, ...]
    machine_cost_per_step: float | None
    price_per_hour: float | None
    utilisation: float | None
    api_cost_per_step: float | None
    api_prices: tuple[float, float, float] | None
    fields: tuple[str, ...]
    versions: dict[str, str]
    commit: str
    command: str
    date: str


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """How fast a device reads memory.

    Attributes:
        bench: 'bandwidth'.
        device: name of the processor, with cores in use.
        gpus: 1, or 0 for a CPU.
        gb_per_s: of all readings.
        method: what was read, and by what.
        runs: readings.
        versions, commit, command, date: as in `DecodeRow`.
        clocks: as in `DecodeRow`.
        others_cores: as in `DecodeRow`.
    """

    bench: str
    device: str
    gpus: int
    gb_per_s: Spread
    method: str
    runs: int
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    clocks: Clocks | None = None
    others_cores: float | None = None


@dataclass(frozen=True, slots=True)
class NeighboursRow:
    """What a client saw of its stream while another one's request was beside it.

    Attributes:
        bench: 'neighbours'.
        engine, url, api, shape: as in `ServeRow`.
        neighbour: kind of the other request; 'none' for the stream alone.
        neighbour_bytes: of its body.
        prompt_tokens: of the stream, by usage; None without.
        max_tokens: of the stream.
        runs: neighbours, one after the other.
        streams: read meanwhile, at least one a run, and more until the neighbour had its answer.
        counting: as in `ServeRow`.
        ttft_ms: of these streams; None where none was read to its end.
        decode_tokens_per_s: of these streams, as in `ServeRow`; None where one cannot be counted.
        share_of_alone: the median of these speeds over that of the stream alone; None without one.
        gap_ms: between instants at which tokens came, of all these streams.
        same_text: every text is that of the first stream, which was read before all others.
        text_sha256: of that text.
        stream_errors: why streams broke, of those that did.
        neighbour_statuses: status of each reply, or why there was none.
        neighbour_s: from sending the request to the end of its reply; None without a neighbour.
        health_ms: times of GET /health meanwhile, asked for twenty times a second.
        health_statuses: all that were seen, or why there was none.
        process: of the server, whose memory was read with that of all its descendants, every 20 ms;
            None where none was named.
        memory_before_bytes, memory_peak_bytes, memory_after_bytes: what they had taken before the
            first neighbour, at most, and one second after the last; pages that they share count
            once, and mapped files do not count.
        memory_per_body_byte: by how much the peak exceeds what was taken before, over
            neighbour_bytes; None without a process, or for bodies below a megabyte.
        fields: beyond OpenAI's, that the server took.
        versions, commit, command, date: as in `DecodeRow`.
    """

    bench: str
    engine: str
    url: str
    api: str
    shape: str
    neighbour: str
    neighbour_bytes: int
    prompt_tokens: int | None
    max_tokens: int
    runs: int
    streams: int
    counting: str
    ttft_ms: Spread | None
    decode_tokens_per_s: Spread | None
    share_of_alone: float | None
    gap_ms: Percentiles | None
    same_text: bool
    text_sha256: str
    stream_errors: tuple[str, ...]
    neighbour_statuses: tuple[str, ...]
    neighbour_s: Spread | None
    health_ms: Percentiles | None
    health_statuses: tuple[str, ...]
    process: str | None
    memory_before_bytes: int | None
    memory_peak_bytes: int | None
    memory_after_bytes: int | None
    memory_per_body_byte: float | None
    fields: tuple[str, ...]
    versions: dict[str, str]
    commit: str
    command: str
    date: str


@dataclass(frozen=True, slots=True)
class RivalRow:
    """What one request gets from another engine, which was asked in its own process.

    Attributes:
        bench: 'rival'.
        engine, version: who was measured.
        shape: name of the model; its weights are random.
        weights: how they are stored: 'bf16', 'fp8' or 'int4'.
        device: name of the GPU.
        prompt_tokens, new_tokens: per run.
        runs: timed runs after a warm-up.
        ttft_ms: request handed to the engine → first token.
        decode_tokens_per_s: (N - 1) / (time of last - time of first token).
        conditions: the engine's settings, in words.
        versions: of Python and the libraries that matter.
        command: as typed.
        date: UTC.
    """

    bench: str
    engine: str
    version: str
    shape: str
    weights: str
    device: str
    prompt_tokens: int
    new_tokens: int
    runs: int
    ttft_ms: Spread
    decode_tokens_per_s: Spread
    conditions: str
    versions: dict[str, str]
    command: str
    date: str


AnyRow = (
    DecodeRow | PrefillRow | StartupRow | AccuracyRow | ServeRow | AgentRow | NeighboursRow
    | BandwidthRow | RivalRow
)  # fmt: skip
