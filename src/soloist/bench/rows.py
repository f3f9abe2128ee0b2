"""The rows of result files: what is measured, its unit, and what judges and repeats it. Pure.

Descriptions of fields are also those of `benchmarks/README.md`, which is written from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Literal

# Whether a prompt, or its beginning, was read before.
Prefix = Literal["cold", "warm", "offloaded", "saved", "kept"]
KernelCache = Literal["warm", "compiled", "cold"]


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
    """The distribution of many single times.

    Attributes:
        p50, p90, p99, max: the least of the times that this share of all times does not exceed.
        min, p10, p25, p75: likewise; older files lack these fields.
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
    """What NVML reported about the GPU while a row was measured.

    Attributes:
        sm_mhz, memory_mhz: clock, over all readings.
        temperature_c: temperature of the GPU, in degrees Celsius.
        power_w: power of the board, in watts.
        throttling: the reasons why clocks were held down in any reading; empty without any.
        readings: number of readings, some tens a second, between runs as well.
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
        engine: the engine that was measured, with its version and mode.
        shape: name of the model, and behind ' + ' of the adapter that was merged into it.
        device: name of the processor, with the cores in use.
        gpus: number of GPUs; 0 on a CPU.
        precision: dtype of the activations, the KV cache and the weights that are not quantised.
        prompt_tokens, new_tokens: number of these tokens in each run.
        columns: (sequence, position) pairs in each decode step, of all sequences together.
        runs: timed runs after a warm-up.
        ttft_ms: request accepted → first token.
        decode_tokens_per_s: (N - 1) / (time of the last token - time of the first token); with
            several columns, decode steps a second times columns.
        streamed_bytes_per_token: bytes that a decode step has to read: the weights, and the KV
            cache at the middle of the run.
        bandwidth_gb_per_s: read bandwidth of this device, measured in this run.
        mbu: memory-bandwidth utilisation: streamed bytes · decode steps a second / bandwidth.
        speculation: whether tokens were drafted.
        output_ids_sha256: hash of the token ids that were generated, to compare runs.
        versions: versions of Python and of the libraries that matter.
        commit: commit of the source tree; with '+changes' if the tree was modified.
        command: the command, as typed.
        date: date and time, in UTC.
        sequences: number of sequences that are decoded side by side.
        start_position: position of the first decode step. If this is not the end of the prompt, the
            KV cache before it holds random values.
        bandwidth_method: how the bandwidth was measured.
        bench: 'decode'; older files lack this field.
        token_ms: times between tokens, of all runs, as the caller receives the tokens.
        clocks: state of the GPU during the measurement; None where nothing reports it.
        others_cores: cores that other processes kept busy during the measurement, including time
            that a host took from a virtual machine. The measuring process and its children do not
            count. Older files lack this field.
        busy_processes: number of processes that ran beside the measurement and only counted
            (`--busy`); `others_cores` leaves them out.
        weights: how the matrices of the layers are stored: 'bf16', 'fp16', 'fp32', 'fp8',
            'fp8-block', 'int8' or 'int4', several joined by '+'; with a quantised LM head also how
            that is, such as 'int4+int8 head'. Other tensors are in `precision`, and so is all that
            the reference implementation computes with. Empty in older files, where it is
            `precision`.
        drafting: where drafts come from: 'prediction' or 'lookup'; empty without speculation.
        wrong: the probability with which each token of the answer was replaced to make the
            prediction; None without one.
        tokens_per_round: tokens behind the first one, for each step that made some, with
            speculation; median over runs.
        accepted: of the drafted tokens, the share that was right; median over runs, None where
            nothing was drafted. Older files lack this field.
        text: name of the file whose beginning was the prompt; a prediction is then what follows in
            it, and the answer otherwise. Empty for a module of Python's library.
        temperature: of sampling, with seed 0; 0 is greedy.
        kv: format of the KV cache, 'int8', 'fp8' or 'int4'; empty where it is `precision`.
        chosen_experts: of a mixture, experts that all columns of a step choose in a layer, mean
            over the layers of the middle step, in a run that is not timed; None where there are
            none, or nobody counted. Older files lack this field.
        predicted: of several requests side by side, those that have a prediction where the row, or
            the one that it is compared with, is of predictions; None: all.
        beside_tokens_per_s: of each of the other requests, mean, while all of them decode; None
            where there are none.
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
    weights: str = ""
    drafting: str = ""
    wrong: float | None = None
    tokens_per_round: float | None = None
    temperature: float = 0.0
    kv: str = ""
    accepted: float | None = None
    text: str = ""
    chosen_experts: float | None = None
    predicted: int | None = None
    beside_tokens_per_s: Spread | None = None


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """How fast one engine reads a prompt of one length.

    Attributes:
        bench: 'prefill'.
        engine, shape, device, gpus, precision: as in `DecodeRow`.
        prompt_tokens: length of the prompt.
        prefix: 'cold' where no token of the prompt was cached, 'warm' where the same prompt came
            before, 'offloaded' where the host's memory has it, 'saved' where files have it, 'kept'
            where another prompt with so many of its first tokens came before.
        cached_tokens: prompt tokens that were cached and not read again; median.
        runs: timed runs after a warm-up.
        ttft_ms: token ids given → first token chosen.
        prompt_tokens_per_s: prompt tokens that were read / time to the first token.
        clocks: as in `DecodeRow`.
        versions, commit, command, date: as in `DecodeRow`.
        others_cores, busy_processes, weights, kv: as in `DecodeRow`.
        streams: answers of other requests that go on while the prompt is read.
        longest_gap_ms: of each run, the longest time between two tokens of one of them; None
            without any.
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
    weights: str = ""
    kv: str = ""
    streams: int = 0
    longest_gap_ms: Spread | None = None


@dataclass(frozen=True, slots=True)
class StartupRow:
    """How long a fresh process takes to its first token: of `soloist run`, or of a server's chat.

    Attributes:
        bench: 'startup'.
        shape: name of the model.
        device: name of the processor, with the cores in use.
        executor: 'decode kernel' or 'reference'.
        precision: as in `DecodeRow`.
        kernel_cache: 'warm' if all kernels were compiled by an earlier start, 'compiled' if
            `soloist compile` had filled the cache, 'cold' if none was compiled.
        runs: number of timed processes, after one that is not timed and reads all files.
        total_s: time from starting the process to its first token.
        weights_s: part of total_s for reading weights; on a GPU, Python imports at the same time.
            None of a server, which does not tell it.
        kernels_s: part of total_s for compiling kernels.
        rest_s: the rest of total_s: interpreter, libraries, GPU, packing, tokenizer, prompt. None
            of a server.
        kernels_built: number of kernels that were compiled.
        versions, commit, command, date: as in `DecodeRow`.
        clocks: as in `DecodeRow`.
        others_cores, weights: as in `DecodeRow`.
        checkpoint_bytes: size of the weights in their files; None in older files.
        gpu_memory_bytes: memory of the GPU that the process took from the beginning of loading to
            the end of its token, without CUDA's own context; None on a CPU, like the next two.
        gpu_tensors_bytes: part of it for weights, KV cache and buffers.
        kv_cache_bytes: part of these for the KV cache.
        host_memory_bytes: most memory of the host that the process had in a start that is not
            timed; files that are mapped do not count.
        context_tokens: positions of the KV cache.
        program: that was started: 'soloist run', as in older files, or 'soloist serve'. A server is
            asked for a streamed chat once it is ready; total_s ends with the first text.
        ready_s: part of total_s until the server was ready; None of `soloist run`.
    """

    bench: str
    shape: str
    device: str
    executor: str
    precision: str
    kernel_cache: str
    runs: int
    total_s: Spread
    weights_s: Spread | None
    kernels_s: Spread
    rest_s: Spread | None
    kernels_built: int
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    clocks: Clocks | None = None
    others_cores: float | None = None
    weights: str = ""
    checkpoint_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    gpu_tensors_bytes: int | None = None
    kv_cache_bytes: int | None = None
    host_memory_bytes: int | None = None
    context_tokens: int | None = None
    program: str = "soloist run"
    ready_s: Spread | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some consecutive positions of a text.

    Attributes:
        first, stop: positions from `first` on, without `stop`.
        mean_kl, nll, nll_difference, nll_standard_error: as in `AccuracyRow`, of these positions.
    """

    first: int
    stop: int
    mean_kl: float
    nll: float
    nll_difference: float
    nll_standard_error: float


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """How far one engine's logits are from fp32 arithmetic on the same weights.

    Attributes:
        bench: 'accuracy'.
        engine: the engine that was measured; 'soloist, prompts' where each beginning of the text
            was read as a prompt, by one pass, 'in 8 bits' with activations in FP8.
        shape: name of the model.
        device: name of the processor, with the cores in use.
        precision: as in `DecodeRow`.
        positions: number of positions of one text, teacher-forced.
        text: which text.
        mean_kl, max_kl: KL divergence of the engine's distributions from those of fp32, in nats,
            over positions.
        nll: mean negative log-likelihood of the text by the engine, in nats a token.
        nll_difference: nll minus the nll of fp32.
        nll_standard_error: standard error of nll_difference, over positions.
        top_1_agreement: share of positions at which the engine and fp32 have the same best token.
        same_bits: ways of making the logits that gave the same bits.
        repeats: number of launches of 64 tokens that gave the same tokens and last logits each.
        versions, commit, command, date, weights: as in `DecodeRow`.
        fp32_weights: weights of the fp32 arithmetic: 'the same' as the engine's, or 'unquantised',
            which are those of the files before they were rounded. Older files lack this field.
        kv: as in `DecodeRow`; fp32 arithmetic stores keys and values in fp32.
        by_position: the same figures by position. Older files lack this field.
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
    weights: str = ""
    fp32_weights: str = "the same"
    kv: str = ""
    by_position: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class ServeRow:
    """What a client saw of an OpenAI-compatible server, one request at a time.

    Attributes:
        bench: 'serve'.
        engine: name that was given to the server, or its address.
        url: address of the server.
        api: route that was asked, 'chat' or 'completions'.
        shape: the model, as the server calls it.
        prefix: 'warm' if every run had the same prompt, 'cold' if every prompt began differently.
        asked_prompt_tokens: wanted length of the prompt; None for a given text.
        prompt_tokens: length of the prompt by usage, template included, median; None without usage.
        cached_tokens: prompt tokens found in the server's cache, median; None where the server does
            not tell.
        max_tokens: limit for new tokens.
        new_tokens: number of generated tokens, median; None where nothing counts them.
        runs: timed runs after a warm-up.
        counting: how the server counted tokens.
        ttft_ms: request sent → first token or tokens. With usage at the end only: → first text, but
            not before the end of a request for one token.
        first_tokens: number of tokens that came first, at once, median; None where it is unknown.
        decode_tokens_per_s: (N_last - N_first) / (t_last - t_first), by the tokens that had arrived
            at these times. With usage at the end only: the difference in tokens of a long and a
            short request, over the difference of their durations.
        no_decode_speed: why there is no decode speed; None where there is one.
        token_ms: times of single tokens, of all runs; the time of a token is its share of the gap
            before it.
        gap_ms: times between arrivals of tokens, of all runs.
        text_sha256: hashes of the generated texts, if every run had the same prompt.
        fields: fields beyond OpenAI's that the server took.
        versions, commit, command, date: as in `DecodeRow`.
        server_tokens_per_s: decode speed by the server's own clock (`timings`); None without one.
        streamed_bytes_per_token: as in `DecodeRow`, from the configuration that was given.
        bandwidth_gb_per_s: read bandwidth of all GPUs of the server, from the result file that was
            given for one GPU, or from the server's timings.
        mbu: as in `DecodeRow`, for one token a step; a server that speculates may be above 1.
        mbu_by: where mbu comes from: 'what was given', or 'the server' for its timings; None
            without mbu.
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
        prompt_tokens, cached_tokens, new_tokens: number of these tokens by usage; None where the
            server does not tell.
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
        turns: number of steps in a loop.
        asked_prompt_tokens: length of the first prompt, at about four characters a token.
        tool_tokens: length that a tool's result adds to the next prompt, likewise.
        max_tokens: limit for the tokens of an answer.
        runs: number of timed loops, after one that is not timed; each begins with another first
            line.
        counting: how the server counted tokens, as in `ServeRow`.
        loop_s: time of all steps of a loop, without the time between steps.
        step_ms: request sent → end of the answer, for all steps of all loops.
        mean_step_ms: mean of the same times.
        ttft_ms: request sent → first token, for the same steps; None where tokens are not counted
            as they arrive.
        decode_tokens_per_s: each loop's median over its steps; None where a step has no speed, or
            tokens are not counted as they arrive.
        by_turn: each step of the loop.
        machine_cost_per_step: mean_step_ms / 1000 · price_per_hour / 3600 / utilisation.
        price_per_hour, utilisation: as given.
        api_cost_per_step: mean cost of a step's tokens by api_prices; None where tokens are not
            counted.
        api_prices: as given, for a million prompt tokens, cached tokens and new tokens.
        fields: fields beyond OpenAI's that the server took.
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
        device: name of the processor, with the cores in use.
        gpus: 1, or 0 for a CPU.
        gb_per_s: read bandwidth, over all readings.
        method: what was read, and by which code.
        runs: number of readings.
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
    """What a client saw of its stream while another client's request was beside it.

    Attributes:
        bench: 'neighbours'.
        engine, url, api, shape: as in `ServeRow`.
        neighbour: kind of the other request; 'none' for the stream alone.
        neighbour_bytes: size of the neighbour's body.
        prompt_tokens: prompt tokens of the stream, by usage; None without usage.
        max_tokens: limit for the stream's new tokens.
        runs: number of neighbours, one after the other.
        streams: number of streams that were read: in each run one, and more until the neighbour had
            its answer.
        counting: as in `ServeRow`.
        ttft_ms: request sent → first token, for these streams; None if none was read to its end.
        decode_tokens_per_s: decode speed of these streams, as in `ServeRow`; None if one of them
            cannot be counted.
        share_of_alone: median of these speeds over the median speed of the stream alone; None
            without one of the two.
        gap_ms: times between arrivals of tokens, of all these streams.
        same_text: whether every stream had the text of the first stream, which was read before all
            others.
        text_sha256: hash of the first stream's text.
        stream_errors: for each stream that broke, the reason.
        neighbour_statuses: status of each reply to a neighbour, or why there was no reply.
        neighbour_s: neighbour's request sent → end of its reply; None without a neighbour.
        health_ms: times of GET /health during the runs, asked twenty times a second.
        health_statuses: all statuses that /health gave, or why it gave none.
        process: process of the server; its memory, with that of all its descendants, was read every
            20 ms. None where no process was named.
        memory_before_bytes: memory of these processes before the first neighbour. Pages that they
            share count once; mapped files do not count.
        memory_peak_bytes: the most that they had taken, counted likewise.
        memory_after_bytes: their memory one second after the last neighbour, counted likewise.
        memory_per_body_byte: (memory_peak_bytes - memory_before_bytes) / neighbour_bytes; None
            without a process, or for bodies below a megabyte.
        fields: fields beyond OpenAI's that the server took.
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
    """What one request gets from another engine, asked in its own process.

    Attributes:
        bench: 'rival'.
        engine: name of the engine.
        version: version of the engine.
        shape: name of the model; its weights are random.
        weights: how weights are stored: 'bf16', 'fp8', 'fp8-block' or 'int4'.
        device: name of the GPU.
        prompt_tokens, new_tokens: number of these tokens in each run.
        runs: timed runs after a warm-up.
        ttft_ms: request handed to the engine → first token.
        decode_tokens_per_s: (N - 1) / (time of the last token - time of the first token); None
            where too few tokens came to say a speed.
        conditions: the engine's settings, in words.
        versions: versions of Python and of the libraries that matter.
        command: the command, as typed.
        date: date and time, in UTC.
        kept_tokens: first tokens of the prompt that came before, and that the engine had cached.
            Older files lack this field.
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
    decode_tokens_per_s: Spread | None
    conditions: str
    versions: dict[str, str]
    command: str
    date: str
    kept_tokens: int = 0


AnyRow = (
    DecodeRow | PrefillRow | StartupRow | AccuracyRow | ServeRow | AgentRow | NeighboursRow
    | BandwidthRow | RivalRow
)  # fmt: skip
