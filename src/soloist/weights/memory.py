"""Bytes of weights: in rows, packed, and of a matrix between the two. Pure arithmetic."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import HALF_TILE_VALUES
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.config import Mixture, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.tensors import TensorSpec, streamed

if TYPE_CHECKING:
    from soloist.model.adapter import Adapter, Change

# Of a quantised matrix on its way to the kernel's order or back; each takes up to so many bytes.
VALUES_AT_ONCE = 1 << 23
_BYTES_EACH = 20
# Of quantised experts, of which several are unpacked together, beside that.
_EXPERT_BYTES_EACH = 8
_PLACE_BYTES = 8

# Of a matrix that an adapter changes: in fp64 twice, in fp32, and as it is read and written.
MERGED_AT_ONCE = 1 << 21
_MERGED_BYTES_EACH = 28
_FACTOR_BYTES_EACH = 12  # as they are read, and in fp64


def row_bytes(specs: Iterable[TensorSpec], dtype: Dtype) -> int:
    """All tensors as they are read."""
    return sum(spec.num_values * spec.held_in(dtype).num_bytes for spec in specs)


def packed_bytes(plan: Plan) -> int:
    """What a rank streams and looks up: image, experts, routers, an embedding that is not tied."""
    table_values = 0 if plan.share.tied_head else plan.model.vocab_size * plan.model.hidden_size
    weights = plan.image.num_bytes + plan.image.experts_bytes
    for mixture in plan.share.mixtures:
        rows = mixture.router.num_experts + mixture.gates_shared
        weights += rows * plan.model.hidden_size * Dtype.FP32.num_bytes
    for layer in range(plan.model.num_layers):
        if (product := plan.image.layer(layer).vectors.get("router_output")) is not None:
            weights += product.num_bytes
    return weights + table_values * plan.dtype.num_bytes


def stored_bytes(
    specs: Iterable[TensorSpec], dtype: Dtype, formats: Mapping[str, WeightFormat]
) -> int:
    """All tensors as the kernel reads them: codes, scales and zeros of those that have formats.

    Without what it adds to even out its blocks' shares.
    """
    return sum(_stored_bytes(spec, dtype, formats.get(spec.name)) for spec in specs)


def _stored_bytes(spec: TensorSpec, dtype: Dtype, stored: WeightFormat | None) -> int:
    if stored is None:
        return spec.num_values * spec.held_in(dtype).num_bytes
    table_bytes = 2 * spec.shape[-1] if stored.is_permuted else 0
    return spec.num_values * stored.half_tile_bytes // HALF_TILE_VALUES + table_bytes


def parts_bytes(
    specs: Iterable[TensorSpec], dtype: Dtype, formats: Mapping[str, WeightFormat]
) -> int:
    """All tensors before they are packed, and if they have formats in parts, which are larger.

    There every row has scales of its own, and a code of six bits a byte.
    """
    in_rows = {
        name: replace(
            stored, scale_rows=1, value_bits=8 if stored.value_bits == 6 else stored.value_bits
        )
        for name, stored in formats.items()
    }
    return stored_bytes(specs, dtype, in_rows)


def streamed_bytes(
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    formats: Mapping[str, WeightFormat],
    config: ModelConfig,
) -> int:
    """What one decode step of one request has to read of them.

    As of `streamed`.
    """
    read = streamed(specs, config.num_chosen, tied_head=config.tied_head)
    return stored_bytes(read, dtype, formats)


def merging_bytes(adapter: "Adapter | None") -> int:
    """What merging takes beside the weights: one tensor, its factors, and some rows in fp64."""
    if adapter is None:
        return 0
    return max(map(_merging_bytes, adapter.changes.values()))


def _merging_bytes(change: "Change") -> int:
    whole = 0 if change.whole is None else 2 * change.whole.num_bytes
    if change.low_rank is None:
        return whole
    factors = sum(math.prod(tensor.shape) for tensor in change.low_rank.tensors)
    rows, columns = change.low_rank.b.shape[0], change.low_rank.a.shape[1]
    at_once = max(MERGED_AT_ONCE, rows, columns)  # at least one row, of the matrix or its transpose
    made = Dtype.FP32.num_bytes * rows * columns
    return whole + made + _FACTOR_BYTES_EACH * factors + _MERGED_BYTES_EACH * at_once


def unpacked_experts_bytes(plan: Plan, at_once: Callable[[Mixture], int]) -> int:
    """What experts take on their way from packed to rows, so many of a mixture at once."""
    total, most = 0, 0
    for kind in plan.image.kinds:
        mlp, experts = kind.layer.mlp, kind.experts
        if experts is None or not isinstance(mlp, Mixture):
            continue
        total += at_once(mlp) * experts.num_bytes
        for matrix in (experts.gate_up, experts.down):
            values = matrix.rows * matrix.columns
            total += at_once(mlp) * values * plan.dtype.num_bytes
            if matrix.format.is_plain:
                total += values * plan.dtype.num_bytes  # where each word of an expert lies
            else:
                total += at_once(mlp) * values * _PLACE_BYTES // HALF_TILE_VALUES * 2
                most = max(most, at_once(mlp) * values * _EXPERT_BYTES_EACH)
    # Recorded passes have what is made on the way once more.
    return total + 2 * most


def unpacking_bytes(plan: Plan, specs: Iterable[TensorSpec]) -> int:
    """What the largest matrix takes on its way from packed to rows."""
    largest = 3 * max(spec.num_values for spec in specs) * plan.dtype.num_bytes
    return largest + (_BYTES_EACH * VALUES_AT_ONCE if plan.formats else 0)
