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
from pathlib import Path
from statistics import median


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
        weights_s: of them, reading weights.
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


def write(file: Path, rows: Sequence[Row | StartupRow | AccuracyRow]) -> None:
    """Write rows to `file`, replacing it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(row) for row in rows], indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def versions(*packages: str) -> dict[str, str]:
    """Python's and each package's version."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def command() -> str:
    """The command line as a user types it."""
    return shlex.join(["soloist", *sys.argv[1:]])


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
