"""A rank's whole share in the kernel's order: every matrix packed and placed, every vector."""

import torch
from torch import Tensor

from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.partition import Matrix
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import OF_EXPERTS
from soloist.model.quantized import COLUMNS
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.packing import ordered, pack, place, place_expert, table_of


def pack_weights(
    plan: Plan, weights: Weights, device: torch.device, *, keep_rows: bool = False
) -> PackedWeights:
    """A rank's weights in the kernel's order.

    Args:
        plan: of the kernel.
        weights: row-major tensors of the rank's share (`shard_all`), best on its GPU; entries are
            taken out as they are packed, so that not all of them lie in memory twice.
        device: the rank's GPU.
        keep_rows: leave `weights` as they are, but for experts.
    """
    take = weights.__getitem__ if keep_rows else weights.pop
    dtype, layout, shape = TORCH_DTYPES[plan.dtype], plan.image, plan.shape
    image = torch.zeros(plan.grid_blocks, layout.block_stride, dtype=torch.uint8, device=device)
    vectors = torch.zeros(
        shape.vector_lanes, layout.vector_values, dtype=torch.float32, device=device
    )

    def put_matrix(layer: int, name: str, tensor: str) -> None:
        op = layout.operation(layer, name)
        parts = {part: take(tensor + part) for part in op.matrix.format.parts}
        if COLUMNS in parts:
            words, start = table_of(op, parts.pop(COLUMNS)), layout.table_offset(layer, name)
            vectors.view(torch.int32)[:, start : start + len(words)] = words.to(device)
        for i, own_image in enumerate(image.split(plan.blocks)):
            own = {
                part: values.reshape(shape.lanes_here, -1, values.shape[-1])[i].to(device)
                for part, values in parts.items()
            }
            if op.matrix.format.is_plain:
                own[""] = own[""].to(dtype)
            place(plan, op, layer, pack(plan, op, own), own_image)

    def put_vector(start: int, values: Tensor, matrix: Matrix | None = None) -> None:
        own = values.to(device, torch.float32)
        own = own if matrix is None else ordered(shape, matrix, own)
        vectors[:, start : start + own.shape[-1]] = own

    for layer in range(shape.num_layers):
        kind = layout.layer(layer)
        biased = {f"{name}_bias": op.matrix for name, op in kind.operations.items()}
        for name in kind.in_blocks:
            put_matrix(layer, name, f"layers.{layer}.{name}")
        for name in kind.vectors:
            values = take(f"layers.{layer}.{name}")
            values = values.flatten() if name == "router" else values
            put_vector(layout.vector_offset(layer, name), values, biased.get(name))
    experts = _packed_experts(plan, weights, device)
    put_vector(layout.final_norm_offset, take("final_norm"))
    if plan.share.tied_head:
        put_matrix(0, "head", "embedding")
        return PackedWeights(image, vectors.flatten(), None, experts)
    put_matrix(0, "head", "head")
    table = take("embedding").to(device, dtype).contiguous()
    return PackedWeights(image, vectors.flatten(), table, experts)


def _packed_experts(plan: Plan, weights: Weights, device: torch.device) -> Tensor | None:
    """Those of all layers, if there are any; taken out of `weights`."""
    if not plan.has_experts:
        return None
    dtype, layout = TORCH_DTYPES[plan.dtype], plan.image
    packed = torch.empty(layout.experts_bytes, dtype=torch.uint8, device=device)
    for layer in range(plan.shape.num_layers):
        experts = layout.layer(layer).experts
        for number in range(experts.router.num_experts if experts else 0):
            at = f"layers.{layer}.experts.{number}."
            matrices = {}
            for name in OF_EXPERTS:
                stored = layout.operation(layer, name).matrix.format
                to = dtype if stored.is_plain else None
                matrices[name] = {
                    part: weights.pop(at + name + part).to(device, to) for part in stored.parts
                }
            place_expert(plan, layer, number, matrices, packed)
    return packed
