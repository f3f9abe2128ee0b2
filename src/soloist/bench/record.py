"""Result files: a JSON list of rows, each with everything needed to judge and repeat it."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from soloist.errors import UserError


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
    """Of many single times; each is the least value that so many of them do not exceed."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], digits: int = 3) -> "Percentiles":
        """Summarise `values`, at least one, rounded for reading."""
        ordered = sorted(values)
        ranks = [ceil(share * len(ordered)) - 1 for share in (0.5, 0.9, 0.99, 1)]
        return cls(*(round(ordered[rank], digits) for rank in ranks))


@dataclass(frozen=True, slots=True)
class Row:
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
        mbu: memory-bandwidth utilisation, streamed bytes · decode steps a second / bandwidth of all
            GPUs.
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
        versions, commit, command, date: as in `Row`.
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
        versions, commit, command, date: as in `Row`.
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
        versions, commit, command, date: as in `Row`.
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
        versions, commit, command, date: as in `Row`.
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


AnyRow = Row | StartupRow | AccuracyRow | ServeRow | BandwidthRow


def write(file: Path, rows: Sequence[AnyRow]) -> None:
    """Write rows to `file`, replacing it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(row) for row in rows], indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def read(file: Path) -> list[dict[str, Any]]:
    """Rows of a result file, as they are in it.

    Raises:
        UserError: the file is not there, or not such a file.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{file} cannot be read: {reason}", _WHERE_FROM) from error
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {error}", _WHERE_FROM) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file} is no list of rows", _WHERE_FROM)
    return rows


_WHERE_FROM = "make one with soloist bench and its --output"


def versions(*packages: str) -> dict[str, str]:
    """Python's and each package's version."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def command() -> str:
    """The command line as a user types it; keys are not shown."""
    words = ["soloist", *sys.argv[1:]]
    for i, word in enumerate(words):
        name, is_joined, _ = word.partition("=")
        if name == "--api-key":
            if is_joined:
                words[i] = f"{name}=…"
            elif i + 1 < len(words):
                words[i + 1] = "…"
    return shlex.join(words)


def commit() -> str:
    """Short hash of the source tree this module runs from; 'unknown' outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(  # noqa: S603 - fixed words
            ["git", "-C", str(folder), *words],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
