"""A model on a machine: whether it fits, and how fast, by precision and number of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from soloist.device import HEADROOM_BYTES
from soloist.errors import DoesNotFit, SettingError, ShapeUnsupported, gigabytes
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.maths import require_architecture
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat
from soloist.planning.bounds import kv_bytes_held, speed_limit, step_cost
from soloist.planning.expectation import Expectation, Wall, expect, is_measured
from soloist.planning.hardware import Hardware
from soloist.planning.model import EXPERTS, Model
from soloist.planning.precision import (
    PRECISIONS,
    SIXTEEN_BIT,
    Precision,
    can_store,
    weights_bytes,
)
from soloist.planning.speculation import Round, Speculation, expect_round

GPU_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned for.

    Attributes:
        model: in figures.
        hardware: one kind of GPU.
        context_tokens: positions in memory and in sight of every step.
        speculation: how tokens are drafted; None: they are not.
    """

    model: Model
    hardware: Hardware
    context_tokens: int
    speculation: Speculation | None = None

    @property
    def draft_bytes(self) -> int:
        """Held for drafting, over all GPUs: a draft model's weights and KV cache."""
        draft = None if self.speculation is None else self.speculation.draft
        if draft is None:
            return 0
        weights = weights_bytes(draft.specs, SIXTEEN_BIT)
        return weights + kv_bytes_held(draft, self.context_tokens)


@dataclass(frozen=True, slots=True)
class Reach:
    """One precision on one number of GPUs.

    Attributes:
        weights_bytes, kv_bytes, draft_bytes: held, over all GPUs.
        bytes_per_token: read for a token, over all GPUs.
        missing_bytes: what each GPU lacks; 0 where the model fits.
        limit_tokens_per_s: at peak bandwidth.
        expected: parts of a token's time.
        measured: all costs in it were measured on this hardware; otherwise it is an assumption.
        obstacle: why Soloist cannot run it yet; empty where it can.
        speculating: a round of drafting and checking; None where nothing is drafted.
    """

    precision: Precision
    gpus: int
    weights_bytes: int
    kv_bytes: int
    bytes_per_token: int
    missing_bytes: int
    limit_tokens_per_s: float
    expected: Expectation
    measured: bool
    obstacle: str
    draft_bytes: int = 0
    speculating: Round | None = None

    @property
    def fits(self) -> bool:
        """Weights, KV cache and reserve find room."""
        return self.missing_bytes == 0

    @property
    def wall(self) -> Wall:
        """What comes first."""
        return self.expected.wall if self.fits else Wall.CAPACITY


def reach(subject: Subject, precision: Precision, gpus: int, obstacle: str = "") -> Reach:
    """Sizes and speeds; weights and KV cache are shared out evenly over the GPUs."""
    hardware = subject.hardware
    cost = step_cost(subject.model, precision, subject.context_tokens)
    speculating = None
    if subject.speculation is not None:
        speculating = expect_round(
            subject.model, precision, subject.context_tokens, subject.speculation, hardware, gpus
        )
    expected = expect(cost, hardware, gpus)
    return Reach(
        precision=precision,
        gpus=gpus,
        weights_bytes=weights_bytes(subject.model.specs, precision),
        kv_bytes=kv_bytes_held(subject.model, subject.context_tokens),
        bytes_per_token=cost.num_bytes,
        missing_bytes=max(0, bytes_per_gpu(subject, precision, gpus) - hardware.memory_bytes),
        limit_tokens_per_s=speed_limit(cost.num_bytes, hardware.bandwidth, gpus),
        expected=expected,
        # What unpacking small weights costs has not been measured.
        measured=precision.measured and is_measured(cost.kind, hardware, gpus, cost.kv_name),
        obstacle=obstacle,
        draft_bytes=subject.draft_bytes,
        speculating=speculating,
    )


def reaches(
    subject: Subject, precisions: Sequence[Precision], gpu_counts: Sequence[int]
) -> list[Reach]:
    """Every combination in which the model can be stored.

    Raises:
        SettingError: it can be stored in none of these precisions.
        DoesNotFit: none of them fits; the hint says what would.
    """
    hardware = subject.hardware
    shape_fits = {gpus: not find_shape_obstacle(subject, gpus) for gpus in gpu_counts}
    kv = subject.model.kv
    kv_fits = shape_fits
    if not kv.is_plain:
        kv_fits = {gpus: not find_shape_obstacle(subject, gpus, kv) for gpus in gpu_counts}

    # The kernel reads codes of matrices in two dimensions; a layer's experts are many of them.
    shapes = [s.shape for s in subject.model.specs if s.is_layer_matrix and EXPERTS not in s.name]
    is_quantisable = all(len(shape) == 2 for shape in shapes)

    def obstacle(precision: Precision, gpus: int) -> str:
        if subject.model.config is None:
            return "not this family" if subject.model.mixture else "no text parts"
        if hardware.arch is None:
            return f"no kernel for {hardware.name}"
        if not precision.runs or (precision.bits < SIXTEEN_BIT.bits and not is_quantisable):
            return f"no {precision.name} weights"
        if not shape_fits[gpus]:
            return "reference only"
        return "" if kv_fits[gpus] else f"no {kv.name} KV cache"

    rows = [
        reach(subject, precision, gpus, obstacle(precision, gpus))
        for precision in precisions
        if can_store(subject.model.specs, precision)
        for gpus in gpu_counts
    ]
    if not rows:
        names = ", ".join(p.name for p in PRECISIONS if can_store(subject.model.specs, p))
        given = ", ".join(p.name for p in precisions)
        raise SettingError("--precision", given, f"{names} for rows of this model's lengths")
    if not any(row.fits for row in rows):
        nearest = min(rows, key=lambda row: row.missing_bytes)
        needed = bytes_per_gpu(subject, nearest.precision, nearest.gpus)
        raise DoesNotFit(
            f"this model in {nearest.precision.name} with a context of "
            f"{subject.context_tokens:,} tokens",
            f"each of {nearest.gpus} GPUs" if nearest.gpus > 1 else "one GPU",
            needed,
            hardware.memory_bytes,
            _hint(subject, nearest),
        )
    return rows


def _hint(subject: Subject, nearest: Reach) -> str:
    shorter = longest_context(subject, nearest.precision, nearest.gpus)
    fits = what_fits(subject)
    return f"{fits}; or ask for --context {shorter}" if shorter else fits


def bytes_per_gpu(subject: Subject, precision: Precision, gpus: int) -> int:
    """What each GPU must hold: its share of weights, KV cache and draft, and a reserve."""
    return -(-_held_bytes(subject, precision) // gpus) + HEADROOM_BYTES


def _held_bytes(subject: Subject, precision: Precision) -> int:
    held = weights_bytes(subject.model.specs, precision)
    return held + kv_bytes_held(subject.model, subject.context_tokens) + subject.draft_bytes


def what_fits(subject: Subject) -> str:
    """The fewest GPUs for each precision, or the longest context, or a smaller model."""
    memory = subject.hardware.memory_bytes
    precisions = [p for p in PRECISIONS if can_store(subject.model.specs, p)]
    fewest = [
        (p, next((n for n in GPU_COUNTS if bytes_per_gpu(subject, p, n) <= memory), None))
        for p in precisions
    ]
    found = [f"{p.name} on {count(n)}" for p, n in fewest if n is not None]
    name = subject.hardware.name
    if found:
        return f"what fits on {name}: {', '.join(found)}"
    smallest = min(precisions, key=lambda p: weights_bytes(subject.model.specs, p))
    most = max(GPU_COUNTS)
    tokens = longest_context(subject, smallest, most)
    if tokens:
        return (
            f"what fits on {name}: {smallest.name} on {count(most)} with a context of {tokens:,} "
            "tokens"
        )
    room = gigabytes(most * (memory - HEADROOM_BYTES))
    return f"{count(most)} hold up to {room} of weights; use a smaller model or larger GPUs"


def longest_context(subject: Subject, precision: Precision, gpus: int) -> int:
    """Positions that fit, at most the model's own; 0 where the weights alone do not fit."""
    none, one = (_held_bytes(replace(subject, context_tokens=n), precision) for n in (0, 1))
    room = gpus * (subject.hardware.memory_bytes - HEADROOM_BYTES) - none
    return max(0, min(subject.model.context_tokens, room // (one - none)))


def find_shape_obstacle(subject: Subject, gpus: int = 1, kv: KvFormat | None = None) -> str:
    """Why the decode kernel cannot run this shape on so many GPUs; empty where it can or is none.

    Such a model runs on the reference, but for those that do not run at all. With `kv`, whether
    the kernel stores keys and values so is a part of the question.
    """
    if subject.hardware.arch is None:
        return ""
    if subject.model.config is None:
        what = "a text part of another model"
        if subject.model.mixture is not None:
            what = f"the family '{subject.model.family}'"
        return f"neither the decode kernel nor the reference implementation runs {what}"
    try:
        require_architecture(subject.model.config, subject.hardware.arch)
        make_plan(subject.model.config, Dtype.BF16, TYPICAL[subject.hardware.arch], gpus, kv=kv)
    except ShapeUnsupported as error:
        return error.message
    return ""


def count(gpus: int) -> str:
    """'1 GPU', '8 GPUs'."""
    return f"{gpus} GPU{'s' * (gpus > 1)}"
