"""What `soloist plan` says in sentences: the first wall, what figures rest on, what fits."""

from collections.abc import Mapping, Sequence

from soloist.cli.terminal import millions
from soloist.errors import gigabytes
from soloist.model.tensors import parameters
from soloist.planning.bounds import Kind, kind_of
from soloist.planning.expectation import FORMULA, MEASURED, Wall
from soloist.planning.precision import PRECISIONS, can_store
from soloist.planning.reach import Reach, Subject, find_shape_obstacle, what_fits

_REASONS = {
    Wall.CAPACITY: "weights and KV cache do not fit",
    Wall.BANDWIDTH: "reading weights and KV cache takes most of a token's time",
    Wall.EXCHANGES: "blocks wait for each other longer than they read",
    Wall.COMPUTE: "multiplying takes most of a token's time",
}


def remarks(subject: Subject, rows: Sequence[Reach]) -> list[str]:
    """Which wall comes first where, what the figures rest on, and what would fit."""
    lines = ["only the text part of this model is counted"] if subject.model.is_part else []
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
        lines.append(f"{'reference only' if subject.model.config else 'not yet'}: {shape}")
    lines.append("at most: peak bandwidth × GPUs / bytes read per token, none of them from a cache")
    return [
        *lines,
        f"expected: {FORMULA}",
        *_speculation(subject, rows[0]),
        *basis(subject, rows),
    ]


def _sharing(subject: Subject, rows: Sequence[Reach]) -> list[str]:
    """What splitting the KV cache assumes where a model has fewer KV heads than GPUs."""
    model, most = subject.model, max(row.gpus for row in rows)
    fewest = min((cache.heads for cache in model.caches), default=most)
    if model.config is not None or fewest >= most:
        return []
    what = f"{fewest} heads" if fewest > 1 else "one latent for all heads"
    return [
        f"assumed: {most} GPUs split the KV cache evenly, though it has {what}; a GPU that holds "
        "more than its share needs more memory and reads more"
    ]


def _speculation(subject: Subject, row: Reach) -> list[str]:
    """How tokens are drafted, and which figures are assumed."""
    s = subject.speculation
    if s is None or row.speculating is None:
        return []
    source, drafting = "looked up in the text at no cost", ""
    if s.draft is not None:
        drafting = f"{s.drafts} drafts and "
        held = gigabytes(subject.draft_bytes)
        source = f"from a model of {millions(parameters(s.draft.specs))} parameters ({held})"
    told = "assumed; set it with --acceptance" if s.is_assumed else "given"
    lines = [
        f"speculating: {s.drafts} draft tokens a round, {source}; each is accepted with "
        f"probability a = {s.acceptance:.0%} if all before it are ({told}), so a round makes "
        f"1 + a + … + a^{s.drafts} = {s.tokens_per_round:.3g} tokens, in the time of "
        f"{drafting}a step of {s.drafts + 1} query tokens"
    ]
    if subject.model.mixture is not None:
        lines.append(
            f"speculating: each query chooses its own {subject.model.mixture.chosen} of "
            f"{subject.model.mixture.experts} experts, so a step of several reads more experts"
        )
    return lines


def _by_gpus(waits: Mapping[int, float]) -> str:
    return ", ".join(f"{seconds * 1e6:.1f} on {gpus}" for gpus, seconds in waits.items())


def basis(subject: Subject, rows: Sequence[Reach]) -> list[str]:
    """What the expectations were measured on, and what they assume."""
    hardware, kind = subject.hardware, kind_of(subject.model)
    lines = [
        *_sharing(subject, rows),
        f"measured on {MEASURED.hardware}: {MEASURED.read_bandwidth / 1e12:.3g} TB/s read by one "
        "GPU; wait in a layer (5 exchanges) in µs by number of GPUs: "
        f"{_by_gpus(MEASURED.waits[Kind.DENSE].layer_s)}; {MEASURED.sources}",
    ]
    if hardware.name != MEASURED.hardware:
        lines.append(
            f"assumed: nothing was measured on {hardware.name}; it reads at the same "
            f"{MEASURED.read_share:.1%} of its peak and waits as long, or longer over a slower "
            "link"
        )
    if kind is Kind.OTHER:
        lines.append(
            "assumed: layers wait as long as dense layers; the extra time of routing is left out"
        )
    elif kind is Kind.EXPERTS:
        waits = MEASURED.waits[kind]
        lines.append(
            f"with experts, in µs a layer, in which all but experts streams: "
            f"{_by_gpus(waits.layer_s)}; measured with one shape on "
            f"{' and '.join(map(str, waits.measured_on))} GPUs (benchmarks/results/"
            "h200-experts.json, 2-h200-experts.json) and assumed on others"
        )
    elif kind is Kind.LANES:
        waits = MEASURED.waits[kind]
        lines.append(
            f"with lanes, in µs a layer: {_by_gpus(waits.layer_s)}; measured on "
            f"{' and '.join(map(str, waits.measured_on))} GPUs (benchmarks/results/2-h200.json, "
            "4-h200.json) and assumed on others"
        )
    unpacked = list(dict.fromkeys(r.precision.name for r in rows if not r.precision.measured))
    if unpacked:
        lines.append(f"assumed: dequantising {', '.join(unpacked)} costs nothing")
    if not subject.model.kv.is_plain:
        name = subject.model.kv.name
        share = MEASURED.kv_read_shares[name]
        lines.append(
            f"a KV cache in {name} is read at {share:.0%} of that bandwidth (measured on 1 GPU: "
            "benchmarks/results/h200-kv.json; assumed on others); the decode kernel has it beside "
            "bf16, not fp16"
        )
    shown = {row.precision for row in rows}
    unfit = [p for p in PRECISIONS if not can_store(subject.model.specs, p)]
    if len(shown) > 1 and unfit:
        groups = ", ".join(f"{p.name}, with a scale for {p.groups[-1]} weights" for p in unfit)
        lines.append(f"left out: {groups} of a row; this model's rows are no multiple of that")
    return lines
