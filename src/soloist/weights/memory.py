"""Bytes of weights: in rows, packed, and of a matrix between the two. Pure arithmetic."""

from collections.abc import Iterable

from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from soloist.model.tensors import TensorSpec, parameters


def row_bytes(specs: Iterable[TensorSpec], dtype: Dtype) -> int:
    """All tensors as they are read."""
    return parameters(specs) * dtype.num_bytes


def packed_bytes(plan: Plan) -> int:
    """What a rank streams and looks up: its image, and the embedding where the head is not tied."""
    table_values = 0 if plan.share.tied_head else plan.model.vocab_size * plan.model.hidden_size
    return plan.image.num_bytes + table_values * plan.dtype.num_bytes


def unpacking_bytes(specs: Iterable[TensorSpec], dtype: Dtype) -> int:
    """What the largest matrix takes on its way from packed to rows."""
    return 3 * max(spec.num_values for spec in specs) * dtype.num_bytes
