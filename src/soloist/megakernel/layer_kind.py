"""Layers of one kind run the same code: their multiplies, how loops are unrolled, their vectors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from soloist.errors import ShapeUnsupported
from soloist.megakernel.experts import Experts
from soloist.megakernel.gpu import Gpu
from soloist.megakernel.layout import Buffer, end_of, stack
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.program import (
    OF_EXPERTS,
    SHARED,
    Product,
    matrix_shape,
    products_of,
    vector_sizes,
)
from soloist.megakernel.tile import STEP_COLUMNS, TILE_ROWS
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.config import Layer, Mixture
from soloist.model.quantized import COLUMNS


@dataclass(frozen=True, slots=True)
class Operation:
    """One multiply of the round and how its loop is unrolled.

    Attributes:
        matrix: what is multiplied.
        group_tiles: tiles whose sums a warp keeps at once. A block's further tiles come after them.
        gpu: where.
    """

    matrix: Matrix
    group_tiles: int
    gpu: Gpu

    @property
    def depth(self) -> int:
        """Steps of a turn of the loop, whose activations are in flight together.

        Even, if not all steps, where two steps share a slot or are a pair.
        """
        tuning, steps = self.gpu.architecture.tuning, self.matrix.steps
        plain = self.matrix.format.is_plain
        # Slots of quantised weights that no turn of fewer steps fills are worth twice the code.
        unrolled = tuning.unrolled_tile_steps * (1 if plain else 2) // self.group_tiles
        allowed = tuning.max_depth if plain else tuning.quantized_max_depth
        most = min(steps, allowed, max(2, unrolled))
        fit = [d for d in range(1, most + 1) if self._can_unroll(d)]
        if not plain:
            return self._depth_of_quantized(fit)
        # With registers to spare some of the unrolled steps may be left out at the end.
        least = most // 2 if self.gpu.architecture.moves_registers else 1
        return next((d for d in reversed(fit) if d > least and steps % d == 0), fit[-1])

    def _depth_of_quantized(self, fit: Sequence[int]) -> int:
        """Of those that fill slots; steps that are left over at the end have code of their own."""
        most_tiles = max(map(self._slot_tiles, fit))
        fit = [d for d in fit if self._slot_tiles(d) == most_tiles]
        # One query is converted apart from the loop, which needs no more than a few slots' tiles.
        enough = self.gpu.architecture.tuning.unrolled_tile_steps // 2
        return next((d for d in fit if d * self.group_tiles >= enough), fit[-1])

    def depth_for(self, queries: int, fewer: int) -> int:
        """The same in a build for so many queries.

        Activations of several queries for quantised weights wait in registers. With no more than
        `fewer` steps there is room for them, as long as a turn has whole slots.
        """
        depth = self.depth
        if queries == 1 or self.matrix.format.is_plain or depth <= fewer:
            return depth
        fits = self._can_unroll(fewer) and self._slot_tiles(fewer) % self.slot_tiles == 0
        return fewer if fits else depth

    def _can_unroll(self, depth: int) -> bool:
        """Whether a turn of the loop may have so many steps."""
        if depth == self.matrix.steps:
            return True
        if (self.matrix.shares_slots or self.matrix.pairs_steps) and depth % 2:
            return False
        return self.matrix.format.is_plain or CONVERTED_STEPS[0] % depth == 0

    @property
    def steps_at_once(self) -> int:
        """Whose activations are converted at once with one query, at most.

        All that there may be room for where a few are multiplied before the next have come: of one
        tile in a block, and of weights in 4 bits. Nobody has measured fewer of super-blocks and of
        permuted matrices.
        """
        stored = self.matrix.format
        if stored.value_bits != 8 or stored.is_permuted or self.group_tiles == 1:
            return CONVERTED_STEPS[0]
        return self.gpu.architecture.tuning.byte_steps_at_once

    @property
    def slot_tiles(self) -> int:
        """Tiles in a slot of the ring.

        As many as the format has room for, if every turn of the loop begins with a slot.
        """
        return self._slot_tiles(self.depth)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a full slot of this matrix."""
        return self.slot_tiles * 2 * self.matrix.format.half_tile_bytes

    def _slot_tiles(self, depth: int) -> int:
        matrix, tiles = self.matrix, self.matrix.format.tiles
        turns = [_tiles_of(halves, depth) for halves in self._halves]
        if depth == matrix.steps and len(self._groups) == 1:
            return tiles
        turns += [_tiles_of(halves, matrix.steps) for halves in self._groups[:-1]]
        while any(count % tiles for count in turns):
            tiles //= 2
        return tiles

    @property
    def table_values(self) -> int:
        """Values of 32 bits that the table of a permuted matrix takes: 16 bits for each column.

        Columns of padding have entries, too.
        """
        matrix = self.matrix
        return matrix.steps * STEP_COLUMNS // 2 if matrix.format.is_permuted else 0

    @property
    def _groups(self) -> list[int]:
        """Half tiles of each group of tiles in the busiest block."""
        halves, most = self.matrix.max_units * self.matrix.unit_half_tiles, 2 * self.group_tiles
        return [min(most, halves - start) for start in range(0, halves, most)]

    @property
    def _halves(self) -> set[int]:
        """Half tiles that some block multiplies together."""
        matrix, last = self.matrix, self._groups[-1]
        fewer = last - matrix.unit_half_tiles if matrix.units % matrix.blocks else last
        return {*self._groups, fewer} - {0}


# Steps whose activations are asked for and converted at once, see cuda/tile/one_query.cuh, and for
# how many of them there may be room.
LOADED_STEPS = 4
CONVERTED_STEPS = (16, 8, LOADED_STEPS)


def _tiles_of(halves: int, steps: int) -> int:
    """Tiles of so many half tiles and steps; half tiles of two steps make one."""
    return steps // 2 * halves + steps % 2 * (halves // 2 + halves % 2)


@dataclass(frozen=True)
class Spread:
    """Over what the rows of a model's matrices are spread.

    Attributes:
        blocks: of each rank, or of each of its lanes.
        gpu: each rank's.
        is_shared: other ranks or lanes have rows of the same layer.
    """

    blocks: int
    gpu: Gpu
    is_shared: bool

    @property
    def most_tiles(self) -> int:
        """Tiles whose sums fit the registers of a thread."""
        tuning = self.gpu.architecture.tuning
        registers = self.gpu.architecture.consumer_registers - tuning.multiply_registers
        return registers // tuning.tile_registers

    def in_groups(self, matrix: Matrix, tiles: int) -> Operation:
        """A multiply with the sums of so many tiles at once."""
        return Operation(matrix, tiles, self.gpu)

    def head(self, vocab_size: int, hidden_size: int, stored: WeightFormat) -> Operation:
        """The LM head, in groups of tiles since its accumulators do not fit registers at once."""
        matrix = Matrix("head", vocab_size, hidden_size, RowOrder.NATURAL, self.blocks, stored)
        least, most = matrix.max_units, self.gpu.architecture.tuning.head_group_tiles
        # All groups full in all blocks, few rows of padding, and large groups: they read
        # activations less often.
        tiles, units = min(
            ((t, -(-least // (2 * t)) * 2 * t) for t in range(1, most + 1)),
            key=lambda choice: choice[1] * (1 + 0.01 * most / choice[0]),
        )
        return self.in_groups(replace(matrix, padded_units=units * self.blocks), tiles)


@dataclass(frozen=True)
class LayerKind:
    """All layers with the same sizes, biases, norms, formats and permuted matrices.

    Attributes:
        layer: sizes of a rank's (or lane's) share; window and rope are those of the first of them.
        hidden_size: H.
        formats: of its matrices, by name.
        spread: over which blocks.
    """

    layer: Layer
    hidden_size: int
    formats: tuple[tuple[str, WeightFormat], ...]
    spread: Spread

    @cached_property
    def operations(self) -> dict[str, Operation]:
        """The multiplies of a layer by name, in order; those of experts are of one of them."""
        return {product.name: self._operation(product) for product in products_of(self.layer)}

    @cached_property
    def in_blocks(self) -> dict[str, Operation]:
        """Those whose weights lie with the blocks that multiply them: all but those of experts."""
        if self.experts is None:
            return self.operations
        return {name: op for name, op in self.operations.items() if name not in OF_EXPERTS}

    @cached_property
    def experts(self) -> Experts | None:
        """The layer's experts; None where it has an MLP."""
        if not isinstance(self.layer.mlp, Mixture):
            return None
        gate_up, down = (self.operations[name].matrix for name in OF_EXPERTS)
        mixture = self.layer.mlp
        return Experts(mixture.router, gate_up, down, gates_shared=mixture.gates_shared)

    def _operation(self, product: Product) -> Operation:
        rows, columns = matrix_shape(product.name, self.layer, self.hidden_size)
        stored = dict(self.formats)[product.name]
        matrix = Matrix(product.name, rows, columns, product.order, self.spread.blocks, stored)
        if isinstance(self.layer.mlp, Mixture) and product.name == "gate_up":
            # Which block multiplies a tile depends on the choice, so each lies on its own.
            return self.spread.in_groups(replace(matrix, blocks=matrix.units), 1)
        if isinstance(self.layer.mlp, Mixture) and product.name == "down":
            matrix = replace(
                matrix,
                ends_in_half=matrix.may_end_in_half,
                skips_padding=matrix.may_skip_padding,
            )
        if matrix.order is not RowOrder.PAIRED:
            return self.spread.in_groups(matrix, matrix.max_tiles)
        # In as few groups of tiles as registers allow.
        most = self.spread.most_tiles
        if not stored.is_plain:
            most = min(most, self.spread.gpu.architecture.tuning.quantized_group_tiles)
        groups = -(-matrix.max_tiles // most)
        if groups == 1 and (self.spread.is_shared or product in SHARED):
            # A share has few rows for each block, and so has an MLP beside experts: smaller units
            # part them more evenly.
            finer = replace(matrix, order=RowOrder.FINELY_PAIRED)
            matrix = min(matrix, finer, key=lambda m: m.max_block_bytes)
        return self.spread.in_groups(matrix, -(-matrix.max_tiles // groups))

    @cached_property
    def num_bytes(self) -> int:
        """Packed weights of one layer that lie in a block's, one matrix after the other."""
        return sum(op.matrix.max_block_bytes for op in self.in_blocks.values())

    @cached_property
    def streamed_bytes(self) -> int:
        """What the busiest block streams of one layer, with the experts of one query."""
        return self.num_bytes + (self.experts.max_block_bytes if self.experts else 0)

    def matrix_offset(self, name: str) -> int:
        """Bytes from the start of a block's layer to a matrix."""
        offset = 0
        for op in self.in_blocks.values():
            if op.matrix.name == name:
                return offset
            offset += op.matrix.max_block_bytes
        raise KeyError(name)

    def block_bytes(self, block: int) -> int:
        """Weights of one layer that a block streams, with the experts of one query."""
        own = sum(op.matrix.block_bytes(block) for op in self.in_blocks.values())
        return own + (self.experts.block_bytes(block) if self.experts else 0)

    @property
    def routes_early(self) -> bool:
        """Logits of experts follow from the stream before attention and from what attention gives.

        Ranks have a part of attention each, so what they publish are parts of logits.
        """
        if self.experts is None or self.layer.attention.output_bias:
            return False
        if self.operations["attention_output"].matrix.format.is_permuted:
            return False
        return self.spread.gpu.architecture.tuning.routes_early

    @property
    def _vector_sizes(self) -> dict[str, int]:
        sizes = vector_sizes(self.layer, self.hidden_size)
        if self.routes_early and self.experts is not None:
            attended = self.operations["attention_output"].matrix.columns
            sizes["router_output"] = self.experts.num_logits * attended
        return sizes

    @cached_property
    def vectors(self) -> dict[str, Buffer]:
        """fp32 norm weights, biases and router of one layer, in bytes from the layer's start."""
        return {name: self._vectors_and_tables[name] for name in self._vector_sizes}

    @cached_property
    def _vectors_and_tables(self) -> dict[str, Buffer]:
        """Tables of columns have the names of their tensors, such as 'down.columns'."""
        sizes = self._vector_sizes
        for name, op in self.operations.items():
            if op.matrix.format.is_permuted:
                sizes[name + COLUMNS] = op.table_values
        return stack({name: (size,) for name, size in sizes.items()}, value_bytes=4)

    @property
    def tables(self) -> tuple[str, ...]:
        """Matrices whose columns are in an order of their own."""
        return tuple(n for n, op in self.operations.items() if op.matrix.format.is_permuted)

    def table_offset(self, name: str) -> int:
        """Values of 32 bits from the layer's vectors to the table of a permuted matrix."""
        return self._vectors_and_tables[name + COLUMNS].offset // 4

    @cached_property
    def vector_values(self) -> int:
        """Values of 32 bits of one layer's vectors and tables."""
        return end_of(self._vectors_and_tables) // 4

    def require_fits(self) -> None:
        """Registers hold the sums of every multiply; the router's rows follow each other.

        Raises:
            ShapeUnsupported: they do not.
        """
        most = self.spread.most_tiles * TILE_ROWS
        for op in self.operations.values():
            rows = op.group_tiles * TILE_ROWS
            if rows > most:
                given = f"{rows} rows of {op.matrix.name} in one of {self.spread.blocks} blocks"
                raise ShapeUnsupported(given, f"at most {most}")
        gate, router = (self.vectors.get(name) for name in ("shared_gate", "router"))
        if gate is not None and router is not None:
            (values,) = router.shape
            if gate.offset - router.offset != values * router.value_bytes:
                given = f"a gate of shared experts behind {values} values of a router"
                raise ShapeUnsupported(given, "behind a multiple of 32")
