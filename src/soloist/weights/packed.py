"""A rank's whole share in the kernel's order: every matrix packed and placed, every vector.

Experts are most of a mixture. So they are packed as they are read, one matrix after the other, and
never lie anywhere else as a whole.
"""

import re
from collections.abc import Iterator
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.partition import Matrix
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import OF_EXPERTS
from soloist.model.quantized import COLUMNS
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.packing import ordered, pack, place, place_expert, table_of
from soloist.weights.routers import router_outputs

# Among the tensors of a rank's share: all of its experts, as `ExpertPacker` packs them.
EXPERTS = "experts"

# Vectors of a layer that are matrices of rows.
_OF_ROUTERS = ("router", "shared_gate", "router_output")
_OF_EXPERT = re.compile(
    r"(?P<matrix>layers\.(?P<layer>\d+)\.experts\.(?P<number>\d+)\.(?P<name>gate_up|down))"
    r"(?P<part>(\..+)?)"
)


def pack_weights(
    plan: Plan, weights: Weights, device: torch.device, *, keep_rows: bool = False
) -> PackedWeights:
    """A rank's weights in the kernel's order.

    Args:
        plan: of the kernel.
        weights: row-major tensors of the rank's share (`shard_all`), best on its GPU; entries are
            taken out as they are packed, so that not all of them lie in memory twice. Experts may
            be packed already, all of them under the name `EXPERTS`.
        device: the rank's GPU.
        keep_rows: leave `weights` as they are, but for experts.
    """
    dtype, layout, shape = TORCH_DTYPES[plan.dtype], plan.image, plan.shape
    take = partial(_taken, weights, router_outputs(plan, weights, device, dtype), keep=keep_rows)
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
            values = values.flatten() if name in _OF_ROUTERS else values
            put_vector(layout.vector_offset(layer, name), values, biased.get(name))
    experts = _packed_experts(plan, weights, device)
    put_vector(layout.final_norm_offset, take("final_norm"))
    if plan.share.tied_head:
        put_matrix(0, "head", "embedding")
        return PackedWeights(image, vectors.flatten(), None, experts)
    put_matrix(0, "head", "head")
    table = take("embedding").to(device, dtype).contiguous()
    return PackedWeights(image, vectors.flatten(), table, experts)


def _taken(weights: Weights, products: Weights, name: str, *, keep: bool) -> Tensor:
    """A tensor of a share, left there if it is to be kept; what was made of several is not."""
    if name in products:
        return products.pop(name)
    return weights[name] if keep else weights.pop(name)


def _packed_experts(plan: Plan, weights: Weights, device: torch.device) -> Tensor | None:
    """Those of all layers, if there are any; taken out of `weights`."""
    if not plan.has_experts:
        return None
    if EXPERTS in weights:
        return weights.pop(EXPERTS)
    packer = ExpertPacker(plan, device)
    for name in packer.names():
        packer.add(name, weights.pop(name))
    return packer.packed()


class ExpertPacker:
    """A rank's experts on their way into the kernel's order, tensor by tensor and in any order.

    Threads may share it.

    Args:
        plan: of the kernel.
        device: the rank's GPU; all that its experts will take is allocated here and now.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._dtype = plan, TORCH_DTYPES[plan.dtype]
        self._packed = torch.empty(plan.image.experts_bytes, dtype=torch.uint8, device=device)
        self._missing = set(self.names())
        self._waiting: dict[str, dict[str, Tensor]] = {}  # parts of matrices that lack others
        self._lock = Lock()

    def names(self) -> Iterator[str]:
        """Of all tensors that it takes, those of a matrix one after the other."""
        image = self._plan.image
        for layer in range(self._plan.shape.num_layers):
            experts = image.layer(layer).experts
            for number in range(experts.router.num_experts if experts else 0):
                for name in OF_EXPERTS:
                    for part in image.operation(layer, name).matrix.format.parts:
                        yield f"layers.{layer}.experts.{number}.{name}{part}"

    @staticmethod
    def takes(name: str) -> bool:
        """Whether a tensor of this name is one of an expert."""
        return _OF_EXPERT.fullmatch(name) is not None

    def add(self, name: str, values: Tensor) -> None:
        """Pack a tensor of the rank's share, or keep it until its matrix has all parts.

        Args:
            name: one of `names`, each of which comes once.
            values: on any device.
        """
        found = _OF_EXPERT.fullmatch(name)
        assert found is not None, f"{name} is none of an expert's tensors"
        layer, number, short = int(found["layer"]), int(found["number"]), found["name"]
        stored = self._plan.image.operation(layer, short).matrix.format
        to = self._dtype if stored.is_plain else None
        part = values.to(self._packed.device, to)
        with self._lock:
            assert name in self._missing, f"{name} is not wanted, or not again"
            self._missing.remove(name)
            parts = self._waiting.setdefault(found["matrix"], {})
            parts[found["part"]] = part
            if len(parts) < len(stored.parts):
                return
            del self._waiting[found["matrix"]]
        place_expert(self._plan, layer, number, {short: parts}, self._packed)

    def packed(self) -> Tensor:
        """All experts, uint8 [bytes], once all of their tensors were added."""
        assert not self._missing, f"{len(self._missing):,} tensors of experts were not added"
        return self._packed
