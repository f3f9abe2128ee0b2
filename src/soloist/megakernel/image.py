"""Where the packed weights and the vectors of every layer lie. Pure.

A block's weights lie together, in the order in which it streams them: layer by layer, then its part
of the head. A kind of layer takes equally many bytes in every block, so that a layer's place is the
same in all. Experts lie on their own, as `Experts` says.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from soloist.megakernel.layer_kind import LayerKind, Operation
from soloist.megakernel.tile import SLOT_BYTES


@dataclass(frozen=True)
class Image:
    """The allocations for weights, experts and vectors of a rank.

    Attributes:
        kinds: of the model's layers.
        kind_of: for every layer, which of `kinds`.
        head: the LM head.
        blocks: of each rank, or of each of its lanes.
        lanes_here: lanes of a rank; their blocks follow each other.
        hidden_size: H, for the final norm.
    """

    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    head: Operation
    blocks: int
    lanes_here: int
    hidden_size: int

    @cached_property
    def _layer_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.kinds[k].num_bytes for k in self.kind_of))

    @cached_property
    def _vector_ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.kinds[k].vector_values for k in self.kind_of))

    def layer(self, number: int) -> LayerKind:
        """The kind of a layer."""
        return self.kinds[self.kind_of[number]]

    def layer_offset(self, number: int) -> int:
        """Bytes from the start of a block's weights to a layer; the head comes after the last."""
        return self._layer_ends[number - 1] if number else 0

    @property
    def head_offset(self) -> int:
        """Bytes from the start of a block's weights to its part of the head."""
        return self._layer_ends[-1]

    def matrix_offset(self, layer: int, name: str) -> int:
        """Bytes from the start of a block's weights to its part of a matrix."""
        if name == self.head.matrix.name:
            return self.head_offset
        return self.layer_offset(layer) + self.layer(layer).matrix_offset(name)

    def operation(self, layer: int, name: str) -> Operation:
        """A layer's multiply, or the head."""
        return self.head if name == self.head.matrix.name else self.layer(layer).operations[name]

    @cached_property
    def block_stride(self) -> int:
        """Bytes from one block's weights to the next: an odd number of slots.

        All blocks walk through their parts at about the same speed; a stride with a large power of
        two in it would send them to the same few memory channels.
        """
        slots = -(-(self.head_offset + self.head.matrix.max_block_bytes) // SLOT_BYTES)
        return (slots | 1) * SLOT_BYTES

    @property
    def num_bytes(self) -> int:
        """The allocation for all packed weights of a rank but its experts."""
        return self.block_stride * self.blocks * self.lanes_here

    def block_bytes(self, block: int) -> int:
        """Weights that one block streams in a round."""
        layers = sum(
            self.kind_of.count(i) * kind.block_bytes(block) for i, kind in enumerate(self.kinds)
        )
        return layers + self.head.matrix.block_bytes(block)

    @cached_property
    def max_block_bytes(self) -> int:
        """Weights that the busiest block streams in a round."""
        return max(self.block_bytes(block) for block in range(self.blocks))

    @cached_property
    def streamed_bytes(self) -> int:
        """Weights that all blocks of a rank stream in a round, padding included."""
        return sum(self.block_bytes(block) for block in range(self.blocks)) * self.lanes_here

    @property
    def busiest_layer_bytes(self) -> int:
        """Of the kind of layer of which a block streams most."""
        return max(kind.streamed_bytes for kind in self.kinds)

    @cached_property
    def _expert_ends(self) -> tuple[int, ...]:
        kinds = (self.kinds[k].experts for k in self.kind_of)
        return tuple(accumulate(experts.layer_bytes if experts else 0 for experts in kinds))

    def experts_offset(self, layer: int) -> int:
        """Bytes from the start of all experts, which lie apart, to those of a layer."""
        return self._expert_ends[layer - 1] if layer else 0

    @property
    def experts_bytes(self) -> int:
        """The allocation for all experts of a rank; 0 where there are none."""
        return self._expert_ends[-1]

    def vector_offset(self, layer: int, name: str = "") -> int:
        """Values of 32 bits from the start of the vectors to a layer's, or to one of them."""
        start = self._vector_ends[layer - 1] if layer else 0
        return start + (self.layer(layer).vectors[name].offset // 4 if name else 0)

    @property
    def final_norm_offset(self) -> int:
        """fp32 values before the final norm's; only the head's table comes after them."""
        return self._vector_ends[-1]

    def table_offset(self, layer: int, name: str) -> int:
        """Values of 32 bits from the start of the vectors to the table of a permuted matrix."""
        if name == self.head.matrix.name:
            return self.head_table_offset
        return self.vector_offset(layer) + self.layer(layer).table_offset(name)

    @property
    def head_table_offset(self) -> int:
        """The same to the head's, whose place is behind the final norm."""
        return self.final_norm_offset + self.hidden_size

    @property
    def vector_values(self) -> int:
        """Values of 32 bits of all vectors and tables of a lane."""
        return self.head_table_offset + self.head.table_values
