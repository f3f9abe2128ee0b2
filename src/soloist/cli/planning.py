"""`soloist plan`: what a machine can reach for a model, without loading or allocating anything."""

from collections.abc import Sequence
from pathlib import Path

from soloist.cli.tables import show_table
from soloist.cli.terminal import millions, print_json
from soloist.errors import CudaMissing, HardwareNotDetected, SettingError, gigabytes
from soloist.jit.bindings import driver
from soloist.model.config import ModelConfig
from soloist.model.families import read_config, tensors
from soloist.model.folder import CONFIG_FILE, find_model
from soloist.model.tensors import parameters
from soloist.planning.expectation import FORMULA, MEASURED, READ_SHARE, Wall
from soloist.planning.hardware import Hardware, find_hardware, from_driver_name, names
from soloist.planning.precision import PRECISIONS, find_precision
from soloist.planning.reach import (
    GPU_COUNTS,
    Reach,
    Subject,
    find_shape_obstacle,
    reaches,
    what_fits,
)
from soloist.settings import read_settings

# Positions in sight where nothing else is asked for; a shorter model has its own.
DEFAULT_CONTEXT_TOKENS = 8192

_REASONS = {
    Wall.CAPACITY: "weights and KV cache have no room",
    Wall.BANDWIDTH: "reading weights and KV cache takes most of a token's time",
    Wall.EXCHANGES: "blocks wait for each other longer than they read",
    Wall.COMPUTE: "multiplying takes most of a token's time",
}


def show(
    model: str,
    file: Path | None,
    hardware: str | None,
    context: int | None,
    gpus: int | None,
    precision: str | None,
    revision: str | None,
    *,
    as_json: bool,
) -> None:
    """Print what the hardware can reach for the model.

    Raises:
        UserError: the model, the hardware or another option cannot be used.
        DeviceError: no known GPU was found, or the model does not fit.
    """
    if gpus is not None and gpus not in GPU_COUNTS:
        raise SettingError("--gpus", gpus, ", ".join(str(n) for n in GPU_COUNTS))
    precisions = PRECISIONS if precision is None else (find_precision(precision),)
    name, config = _read(model, file, revision)
    tokens = min(DEFAULT_CONTEXT_TOKENS, config.context_tokens) if context is None else context
    if not 1 <= tokens <= config.context_tokens:
        raise SettingError("--context", tokens, f"1 … {config.context_tokens:,}")
    target = detect() if hardware is None else find_hardware(hardware)
    subject = Subject(config, tensors(config), target, tokens)
    rows = reaches(subject, precisions, GPU_COUNTS if gpus is None else (gpus,))
    if as_json:
        print_json(_facts(name, subject, rows))
    else:
        _show_words(name, subject, rows)


def detect() -> Hardware:
    """This machine's first GPU, by the driver's name for it.

    Raises:
        HardwareNotDetected: there is no driver or GPU, or no figures for it.
    """
    try:
        cuda = driver()
    except CudaMissing as error:
        raise HardwareNotDetected(f"no GPU was found: {error.message}", names()) from error
    status, found = cuda.cuInit(0)[0], 0
    if status == cuda.CUresult.CUDA_SUCCESS:
        status, found = cuda.cuDeviceGetCount()
    if status != cuda.CUresult.CUDA_SUCCESS or found == 0:
        raise HardwareNotDetected("the NVIDIA driver shows no GPU", names())
    _, given = cuda.cuDeviceGetName(128, cuda.cuDeviceGet(0)[1])
    return from_driver_name(given.split(b"\0")[0].decode())


def _read(model: str, file: Path | None, revision: str | None) -> tuple[str, ModelConfig]:
    """The model's name and configuration; of a hub model only that file is fetched."""
    if file is not None:
        config = read_config(file)
        return file.resolve().parent.name if file.name == CONFIG_FILE else file.stem, config
    offline = read_settings().hub_offline
    folder = find_model(model, revision=revision, offline=offline, wanted=(CONFIG_FILE,))
    return folder.name, read_config(folder / CONFIG_FILE)


def _show_words(name: str, subject: Subject, rows: Sequence[Reach]) -> None:
    h, first = subject.hardware, rows[0]
    flops = "FLOP/s not stated" if h.flops is None else f"{h.flops / 1e12:,.4g} TFLOP/s 16-bit"
    rate = h.link.bytes_per_s
    link = h.link.name + (f" {rate / 1e9:,.0f} GB/s a direction" if rate else "")
    print(
        f"{name} · {subject.config.family} · {millions(parameters(subject.specs))} parameters · "
        f"context {subject.context_tokens:,}: KV cache {gigabytes(first.kv_bytes)}"
    )
    print(
        f"{h.name}{' (announced)' if h.announced else ''} · {gigabytes(h.memory_bytes)} · "
        f"{h.bandwidth / 1e12:.4g} TB/s · {flops} · {link} · {h.source}"
    )
    print("bytes over all GPUs, speeds in tokens/s of one request")
    show_table(
        ("weights", "GPUs", "held", "read a token", "fits", "at most", "expected", "first wall",
         "runs today"),
        [_cells(row) for row in rows],
    )  # fmt: skip
    for line in _remarks(subject, rows):
        print(line)


def _cells(row: Reach) -> tuple[str, ...]:
    fits = "yes" if row.fits else f"no: {gigabytes(row.missing_bytes)} a GPU short"
    limit = expected = "–"
    if row.fits:
        limit = figure(row.limit_tokens_per_s)
        expected = figure(1 / row.expected.token_s) + ("" if row.measured else " (assumed)")
    return (
        row.precision.name,
        str(row.gpus),
        gigabytes(row.weights_bytes),
        gigabytes(row.bytes_per_token),
        fits,
        limit,
        expected,
        row.wall.value,
        f"no: {row.obstacle}" if row.obstacle else "yes" if row.fits else "–",
    )


def _remarks(subject: Subject, rows: Sequence[Reach]) -> list[str]:
    """Which wall comes first where, what the figures rest on, and what would fit."""
    lines = []
    for wall in Wall:
        met = [row for row in rows if row.wall is wall]
        if met:
            by_precision: dict[str, list[str]] = {}
            for row in met:
                by_precision.setdefault(row.precision.name, []).append(str(row.gpus))
            where = "; ".join(
                f"{name} on {', '.join(counts)} GPU{'s' * (counts != ['1'])}"
                for name, counts in by_precision.items()
            )
            lines.append(f"{wall.value} first: {where} ({_REASONS[wall]})")
    if any(not row.fits for row in rows):
        lines.append(what_fits(subject))
    shape = find_shape_obstacle(subject)
    if shape:
        lines.append(f"reference only: {shape}")
    lines.append("at most: peak bandwidth × GPUs / bytes read a token, none of them from a cache")
    return [*lines, f"expected: {FORMULA}", *_basis(subject.hardware, rows)]


def _basis(hardware: Hardware, rows: Sequence[Reach]) -> list[str]:
    """What the expectations were measured on, and what they assume."""
    measured = MEASURED.get(hardware.name)
    if measured is None:
        return [
            f"assumed: nothing was measured on {hardware.name}; it reads at the H200's "
            f"{READ_SHARE:.1%} of peak bandwidth, and what exchanges cost is left out, so less is "
            "likely"
        ]
    waits = ", ".join(f"{s * 1e6:.1f} on {n}" for n, s in measured.layer_wait_s.items())
    lines = [
        f"measured: {measured.read_bandwidth / 1e12:.3g} TB/s read by one GPU; waiting of a layer "
        f"(5 exchanges) in µs by GPUs: {waits}; {measured.sources}"
    ]
    if any(row.expected.wait_s is None for row in rows):
        lines.append("assumed: a model with lanes waits elsewhere; what that costs is left out")
    if any(not row.precision.runs for row in rows):
        lines.append("assumed: unpacking fp8, int4 and fp4 costs nothing")
    return lines


def _facts(name: str, subject: Subject, rows: Sequence[Reach]) -> dict[str, object]:
    h = subject.hardware
    return {
        "model": name,
        "family": subject.config.family,
        "parameters": parameters(subject.specs),
        "context_tokens": subject.context_tokens,
        "hardware": {
            "name": h.name,
            "announced": h.announced,
            "memory_bytes": h.memory_bytes,
            "bandwidth_bytes_per_s": h.bandwidth,
            "dense_16_bit_flops": h.flops,
            "link": h.link.name,
            "link_bytes_per_s": h.link.bytes_per_s,
            "source": h.source,
        },
        "formula": FORMULA,
        "basis": _basis(h, rows),
        "rows": [
            {
                "precision": row.precision.name,
                "gpus": row.gpus,
                "weights_bytes": row.weights_bytes,
                "kv_bytes": row.kv_bytes,
                "bytes_per_token": row.bytes_per_token,
                "fits": row.fits,
                "missing_bytes_per_gpu": row.missing_bytes,
                "limit_tokens_per_s": round(row.limit_tokens_per_s, 1),
                "expected_tokens_per_s": round(1 / row.expected.token_s, 1),
                "expected_from": "measured" if row.measured else "assumed",
                "stream_s": row.expected.stream_s,
                "wait_s": row.expected.wait_s,
                "compute_s": row.expected.compute_s,
                "first_wall": row.wall.value,
                "runs": not row.obstacle,
                "obstacle": row.obstacle,
            }
            for row in rows
        ],
    }


def figure(tokens_per_s: float) -> str:
    """Three digits: more would promise what no plan can."""
    digits = max(0, len(str(int(tokens_per_s))) - 3)
    return f"{round(tokens_per_s, -digits):,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"
