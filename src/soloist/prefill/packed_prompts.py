"""Whether prompts are read from the packed weights: what products can do, and the default. Pure."""

from soloist.errors import SettingError, ShapeUnsupported
from soloist.megakernel.plan import Plan
from soloist.prefill.fragments import ARRANGED_COLUMNS, has_fragments
from soloist.prefill.packed_form import (
    ARCH,
    EIGHT_BIT_COLUMNS,
    operations_of,
    takes_eight_bits,
)


def require_packed_prompts(plan: Plan) -> None:
    """Refuse what these products cannot do, before anything is allocated.

    Raises:
        ShapeUnsupported: other GPUs, several of them, lanes, or matrices of other sizes.
    """
    if plan.gpu.arch != ARCH:
        raise ShapeUnsupported(f"prompts from packed weights on {plan.gpu.arch}", ARCH)
    if plan.ranks > 1 or plan.shape.has_lanes:
        raise ShapeUnsupported("prompts from packed weights on several GPUs or lanes", "one GPU")
    if plan.has_experts:
        raise ShapeUnsupported("prompts of mixtures from packed weights", "an MLP in every layer")
    for op in operations_of(plan):
        matrix = op.matrix
        if matrix.columns % ARRANGED_COLUMNS:
            given = f"{matrix.columns} columns of {matrix.name}"
            raise ShapeUnsupported(given, f"multiples of {ARRANGED_COLUMNS}")
        assert has_fragments(op), "a rank that is alone has units of whole halves"


def require_eight_bit_prompts(plan: Plan) -> None:
    """Refuse 8 bits for prompts that no product would take, before anything is allocated.

    Raises:
        SettingError: no matrix of a layer is FP8 with one scale per row.
    """
    layers = [op.matrix for kind in plan.image.kinds for op in kind.operations.values()]
    if any(takes_eight_bits(matrix) for matrix in layers):
        return
    found = ", ".join(dict.fromkeys(matrix.format.name for matrix in layers))
    raise SettingError(
        "--eight-bit-prompts", f"on, with layers in {found}",
        f"FP8 with one scale per row, of rows that are multiples of {EIGHT_BIT_COLUMNS} columns",
        "leave it out, or round a 16-bit model with --weights fp8",
    )  # fmt: skip


def packs_prompts(plan: Plan | None, *, asked: bool | None = None, unpacks: bool = False) -> bool:
    """Whether prompts are read from the packed weights, and no rows are kept.

    Args:
        plan: of the decode kernel; None is the reference's.
        asked: for or against; None: where these products can do it.
        unpacks: matrices are to be unpacked, which is against.
    """
    assert not (asked and unpacks), "one way"
    if unpacks or asked is not None or plan is None:
        return bool(asked)
    try:
        require_packed_prompts(plan)
    except ShapeUnsupported:
        return False
    return True
