"""The decode kernel's arithmetic on the CPU: an oracle for what the plan says and the host packs.

Every block takes its turn in every phase and touches what the kernel's block would: its slots of
the image, its rows of the residual, its pages of the KV pool, and exchange buffers laid out as the
plan says. On the way it is checked that each value of an exchange is written once and before it is
read. Several ranks run side by side, from one exchange between them to the next. What it cannot
show is anything about time: waits, the ring, memory order.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from soloist.megakernel.kv_layout import GRANULE_POSITIONS, PAGE_POSITIONS
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import MAX_COLUMNS, TURNS
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import LAYER
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.weights import TORCH_DTYPES

_PIECE = 8
# Partial results: as many lanes merge those of a column, as many at once.
_MERGE_LANES = 4
_MERGE_BATCH = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """What the kernel finds in the GPU's memory. Any dtype: fp32 shows the layout without rounding.

    Attributes:
        image: packed weights [blocks, bytes], or values in place of bytes.
        vectors: fp32 norm weights and biases.
        embedding: [V, H], or None where the head is tied.
        rope: [positions, D / 2, 2] cosine and sine, fp32.
        pool: [pages, layers, K, 2, 2, 32 · D].
        page_tables: int32 [sequences, pages].
    """

    image: Tensor
    vectors: Tensor
    embedding: Tensor | None
    rope: Tensor
    pool: Tensor
    page_tables: Tensor


class Exchange:
    """One exchange buffer: values that blocks write for each other, NaN while they are absent."""

    def __init__(self, plan: Plan, name: str, value_bytes: int) -> None:
        self._name = name
        *shape, row_bytes = plan.exchanges.workspace[name].shape
        self.values = torch.full((*shape, row_bytes // value_bytes), torch.nan)

    def write(self, epoch: int, where: tuple[object, ...], values: Tensor) -> None:
        """Store at `where` of the epoch's turn, which must be absent."""
        turn = self.values[epoch % TURNS]
        assert turn[where].isnan().all(), f"{self._name}: a value of turn {epoch} is written twice"  # type: ignore[index]
        assert not values.isnan().any(), f"{self._name}: NaN is written"
        turn[where] = values  # type: ignore[index]

    def read(self, epoch: int, where: tuple[object, ...]) -> Tensor:
        """What lies at `where`, all of which must have been written."""
        values = self.values[epoch % TURNS][where]  # type: ignore[index]
        assert not values.isnan().any(), f"{self._name}: turn {epoch} is read before it is written"
        return values

    def clear(self, epoch: int) -> None:
        """What the cleaner warps of all blocks do to a turn."""
        self.values[epoch % TURNS] = torch.nan


class Operand(Exchange):
    """Activations [k / 32][column][k % 32]; columns of padding are zeros for good."""

    def __init__(self, plan: Plan, name: str) -> None:
        super().__init__(plan, name, 2)
        k = torch.arange(self.values.shape[1] * 32).view(-1, 1, 32)
        self._padding = k >= plan.exchanges.operands[name].matrix.columns
        self.values.masked_fill_(self._padding, 0)

    def clear(self, epoch: int) -> None:
        """The same, but for the padding."""
        super().clear(epoch)
        self.values[epoch % TURNS].masked_fill_(self._padding, 0)

    def publish(self, epoch: int, columns: range, k: Tensor, values: Tensor) -> None:
        """Values [columns, k]."""
        self.write(epoch, (k // 32, torch.tensor(columns)[:, None], k % 32), values)

    def read_for(self, op: Operation, epoch: int, columns: int) -> Tensor:
        """[k, 8] for a matrix, zeros for columns that are not in use."""
        chunks = op.matrix.steps * STEP_COLUMNS // 32
        out = self.values.new_zeros(chunks * 32, MAX_COLUMNS)
        part = self.read(epoch, (slice(chunks), slice(columns)))
        out[:, :columns] = part.transpose(1, 2).flatten(0, 1)
        return out


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual on its way to one kind of reader."""

    operand: Operand
    squares: Exchange  # [column][block]: sum of squares, assumed scale


@dataclass(frozen=True, slots=True)
class Group:
    """Columns side by side of one sequence, at rising positions, whose cache is split alike.

    Attributes:
        columns: of the group.
        sequence: whose they are.
        positions: of the columns.
        splits: blocks of a KV head that share the cache.
        first_place: which of the head's blocks serves the first of them; the next ones follow.
        fresh: the group's columns and those of the sequence before them, whose keys and values come
            with this round too.
        fresh_positions: of these.
    """

    columns: range
    sequence: int
    positions: tuple[int, ...]
    splits: int
    first_place: int
    fresh: range
    fresh_positions: tuple[int, ...]


class Interpreter:
    """Runs rounds of a plan, as one rank. One object is one launch.

    Args:
        plan: what to run.
        memory: weights and KV pool of the rank; the pool changes.
        dtype: what the kernel rounds exchanged values to; None for no rounding.
        rank: whose memory it is.
    """

    def __init__(
        self, plan: Plan, memory: Memory, dtype: torch.dtype | None = None, rank: int = 0
    ) -> None:
        self.plan, self.memory, self._dtype, self.rank = plan, memory, dtype, rank
        self._vocabulary = plan.part_of(rank).vocabulary
        self.peers: Sequence[Interpreter] = [self]  # of all ranks
        self._first_head = 0  # in the pool
        self._half = TORCH_DTYPES[plan.dtype] if dtype is None else dtype
        self._sums = {
            name: Exchange(plan, name, 4)
            for name in plan.exchanges.workspace
            if name.startswith("sums")
        }
        self._matrices: dict[tuple[str, int, int], Tensor] = {}
        self._in = Stream(Operand(plan, "hidden_in"), Exchange(plan, "squares_in", 4))
        self._mid = Stream(Operand(plan, "hidden_mid"), Exchange(plan, "squares_mid", 4))
        self._attended = Operand(plan, "attended")
        names = {plan.exchanges.gated(kind) for kind in plan.image.kinds}
        self._gated = {name: Operand(plan, name) for name in names}
        self._projected = Exchange(plan, "projected", 4)
        self._partial = Exchange(plan, "partial", 4)
        self._stats = Exchange(plan, "partial_stats", 4)
        self._best = no_records(plan)
        # Of all ranks, for kernels that sample.
        self._logits = torch.full((MAX_COLUMNS, plan.exchanges.sampled_rows), torch.nan)
        rows = plan.shared.hidden_rows
        self._residual = torch.full((plan.blocks, MAX_COLUMNS, rows), torch.nan)
        self._scale = torch.zeros(plan.blocks, MAX_COLUMNS)
        self._qkv_factor = torch.zeros(plan.blocks, MAX_COLUMNS)
        assert plan.share.tied_head == (memory.embedding is None), "ranks have a table"
        self._check_owners()
        self._embedding_scale = self._measure_embedding()
        self._hidden_in = self._hidden_mid = self._layers_done = self._round = 0
        self._key_places = torch.from_numpy(plan.kv_layout.key_places())
        self._value_places = torch.from_numpy(plan.kv_layout.value_places())

    def _measure_embedding(self) -> float:
        """1 / rms of the table, or of the packed head where it is tied."""
        if self.memory.embedding is not None:
            table = self.memory.embedding
        else:
            head = [self._weights(self.plan.head, 0, block) for block in self._blocks()]
            table = torch.cat(head)[: self.plan.model.vocab_size, : self.plan.model.hidden_size]
        return float(table.float().square().mean().rsqrt())

    def _check_owners(self) -> None:
        layout = self.plan.image
        image = torch.zeros(self.plan.blocks, layout.block_stride, dtype=torch.bool)
        products = [
            (layer, name)
            for layer in range(self.plan.model.num_layers)
            for name in layout.layer(layer).operations
        ]
        for layer, name in (*products, (0, "head")):
            m = self._op(layer, name).matrix
            owned = [u for b in self._blocks() for u in self._units(self._op(layer, name), b)]
            assert owned == list(range(m.units)), f"{m.name}: units owned are {owned}"
            start = layout.matrix_offset(layer, name)
            for b in self._blocks():
                part = image[b, start : start + m.block_bytes(b)]
                assert part.numel() == m.block_bytes(b), f"{m.name} ends beyond the image"
                assert not part.any(), f"{m.name} lies where another matrix does"
                part[:] = True

    def _op(self, layer: int, name: str) -> Operation:
        return self.plan.image.operation(layer, name)

    @property
    def _hidden(self) -> Operation:
        """An operation whose rows are those of the residual stream, as in every layer."""
        return self._op(0, "down")

    def _units(self, op: Operation, block: int) -> range:
        return range(op.matrix.first_unit(block), op.matrix.first_unit(block + 1))

    def _rows(self, op: Operation, block: int) -> range:
        units = self._units(op, block)
        return range(units.start * op.matrix.unit_rows, units.stop * op.matrix.unit_rows)

    def _to_half(self, x: Tensor) -> Tensor:
        return x if self._dtype is None else x.to(self._dtype).float()

    def _weights(self, op: Operation, layer: int, block: int) -> Tensor:
        """[rows, columns] of a block, out of its slots: by group of tiles, two steps, tile."""
        key = (op.matrix.name, layer, block)
        if key not in self._matrices:
            rows, steps = len(self._rows(op, block)), op.matrix.steps
            out = torch.full((rows, steps * STEP_COLUMNS), torch.nan)
            image, stored = self.memory.image[block], op.matrix.format
            # An image without rounding has values for bytes.
            each = 1 if image.dtype is torch.uint8 else 2
            start = at = self.plan.image.matrix_offset(layer, op.matrix.name)
            halves, most = rows // HALF_TILE_ROWS, 2 * op.group_tiles
            for group in range(0, halves, most):
                end = min(group + most, halves)
                for step, half in _slot_order(steps, range(group, end)):
                    count = min(2, end - half)
                    size = count * stored.half_tile_bytes
                    tile = _tile(image[at // each : (at + size) // each], stored, count, self._half)
                    row, column = half * HALF_TILE_ROWS, step * STEP_COLUMNS
                    out[row : row + len(tile), column : column + STEP_COLUMNS] = tile
                    at += size
            assert at - start == op.matrix.block_bytes(block), f"{op.matrix.name}: slots"
            self._matrices[key] = out
        return self._matrices[key]

    def _vector(self, layer: int, name: str, rows: range) -> Tensor:
        """Norm weights or biases of some rows; a bias that the model has not is zero."""
        layout = self.plan.image
        if name == "final_norm":
            start = layout.final_norm_offset
        elif name in layout.layer(layer).vectors:
            start = layout.vector_offset(layer, name)
        else:
            return torch.zeros(len(rows))
        return self.memory.vectors[start + rows.start : start + rows.stop]

    # The residual stream -------------------------------------------------------------------------

    def _embedding_values(self, token: int, rows: range) -> Tensor:
        if self.memory.embedding is not None:
            return self.memory.embedding[token, rows.start : rows.stop].float()
        head = self.plan.head
        owner = head.matrix.owner(token // HALF_TILE_ROWS)
        local = token - self._rows(head, owner).start
        return self._weights(head, 0, owner)[local, rows.start : rows.stop]

    def _publish(
        self, stream: Stream, epoch: int, block: int, columns: int, layer: int, norm: str
    ) -> None:
        rows = self._rows(self._hidden, block)
        x, scale = self._residual[block, :columns, : len(rows)], self._scale[block, :columns]
        scaled = self._to_half(x * self._vector(layer, norm, rows) * scale[:, None])
        stream.operand.publish(epoch, range(columns), _places(rows), scaled)
        squares = torch.stack([x.square().sum(1), scale], dim=1)
        stream.squares.write(epoch, (slice(columns), block), squares)

    def _factor(self, stream: Stream, epoch: int, block: int, columns: int) -> Tensor:
        """[columns]: true scale over the assumed one; the true one is assumed from now on."""
        part = stream.squares.read(epoch, (slice(columns),))
        assumed = part[:, :, 1].amax(1)
        assert torch.equal(part[:, :, 1].amin(1), assumed), "blocks assume different scales"
        mean = part[:, :, 0].sum(1) / self.plan.model.hidden_size
        self._scale[block, :columns] = (mean + self.plan.model.norm_epsilon).rsqrt()
        return self._scale[block, :columns] / assumed

    def _add(self, op: Operation, product: Tensor, layer: int, block: int, columns: int) -> None:
        rows = self._rows(op, block)
        assert rows == self._rows(self._hidden, block), "the residual's rows stay where they are"
        bias = self._vector(layer, f"{op.matrix.name}_bias", rows)
        self._residual[block, :columns, : len(rows)] += (product[:, :columns] + bias[:, None]).T

    # Phases --------------------------------------------------------------------------------------

    def round(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """(logits [columns, V], chosen tokens) of one round; columns of a sequence side by side."""
        return round_of_ranks([self], tokens, sequences, positions)

    @torch.inference_mode()
    def stages(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> Generator[None, None, tuple[Tensor, list[int]]]:
        """The round of one rank; stops where others have to come as far.

        Returns all ranks' logits as they lie here, and the chosen tokens.
        """
        columns = len(tokens)
        assert len(sequences) == len(positions) == columns <= MAX_COLUMNS, "columns"
        self._hidden_in += 1
        for block in self._blocks():
            rows = self._rows(self._hidden, block)
            for c, token in enumerate(tokens):
                self._residual[block, c, : len(rows)] = self._embedding_values(token, rows)
            self._scale[block, :columns] = self._embedding_scale
            self._publish(self._in, self._hidden_in, block, columns, 0, "attention_norm")
        for layer in range(self.plan.model.num_layers):
            yield from self._layer(layer, sequences, positions)
        yield from self._meet(columns)
        self._logits[:] = torch.nan
        yield
        self._head(columns)
        yield from self._until_recorded(columns)
        logits = self._all_logits(columns)
        chosen = self._choose(columns)
        self._in.operand.clear(self._hidden_in + 2)
        self._in.squares.clear(self._hidden_in + 2)
        self._round += 1
        return logits, chosen

    def _blocks(self) -> range:
        return range(self.plan.blocks)

    def _layer(
        self, layer: int, sequences: Sequence[int], positions: Sequence[int]
    ) -> Iterator[None]:
        columns = len(positions)
        run: dict[str, Callable[[], Iterator[None]]] = {
            "qkv": lambda: self._qkv(layer, columns),
            "attention": lambda: self._attention(layer, sequences, positions),
            "attention_output": lambda: self._attention_output(layer, columns),
            "gate_up": lambda: self._gate_up(layer, columns),
            "down": lambda: self._down(layer, columns),
        }
        self._layers_done += 1
        for phase in LAYER:
            yield from run[phase.name]()

    def _qkv(self, layer: int, columns: int) -> Iterator[None]:
        op = self._op(layer, "qkv")
        for block in self._blocks():
            rows = self._rows(op, block)
            x = self._in.operand.read_for(op, self._hidden_in, columns)
            y = (self._weights(op, layer, block) @ x)[:, :columns]
            where = (slice(columns), slice(rows.start, rows.stop), 0)
            self._projected.write(self._layers_done, where, y.T)
            factor = self._factor(self._in, self._hidden_in, block, columns)
            self._qkv_factor[block, :columns] = factor
        yield from ()

    def _attention_output(self, layer: int, columns: int) -> Iterator[None]:
        op = self._op(layer, "attention_output")
        self._hidden_mid += 1
        yield from self._join(op, self._attended, "sums_mid", layer, columns)
        for block in self._blocks():
            self._publish(self._mid, self._hidden_mid, block, columns, layer, "mlp_norm")
        yield from self._listen("in", layer, columns)

    def _gate_up(self, layer: int, columns: int) -> Iterator[None]:
        self._clean_layer()
        op = self._op(layer, "gate_up")
        for block in self._blocks():
            rows = self._rows(op, block)
            x = self._mid.operand.read_for(op, self._hidden_mid, columns)
            y = (self._weights(op, layer, block) @ x)[:, :columns]
            y = y * self._factor(self._mid, self._hidden_mid, block, columns)
            y = y + self._vector(layer, "gate_up_bias", rows)[:, None]
            y = y.unflatten(0, (-1, 2, op.matrix.unit_neurons))
            gate, up = y[:, 0].flatten(0, 1), y[:, 1].flatten(0, 1)
            gated = self._to_half(torch.nn.functional.silu(gate) * up)
            neurons = _places(range(rows.start // 2, rows.stop // 2))
            self._gated_in(layer).publish(self._layers_done, range(columns), neurons, gated.T)
        yield from ()

    def _down(self, layer: int, columns: int) -> Iterator[None]:
        op = self._op(layer, "down")
        self._hidden_in += 1
        yield from self._join(op, self._gated_in(layer), "sums_in", layer, columns)
        last = layer + 1 == self.plan.model.num_layers
        for block in self._blocks():
            norm = "final_norm" if last else "attention_norm"
            self._publish(self._in, self._hidden_in, block, columns, layer + 1, norm)
        yield from self._listen("mid", layer + 1, columns)

    def _gated_in(self, layer: int) -> Operand:
        return self._gated[self.plan.exchanges.gated(self.plan.image.layer(layer))]

    def _join(
        self, op: Operation, operand: Operand, sums: str, layer: int, columns: int
    ) -> Iterator[None]:
        """The product of attention_output or down joins the residual, ranks summed in order."""
        done = self._layers_done
        for block in self._blocks():
            y = self._weights(op, layer, block) @ operand.read_for(op, done, columns)
            if self.plan.ranks == 1:
                self._add(op, y, layer, block, columns)
                continue
            rows = self._rows(op, block)
            for peer in self.peers:
                peer.accept_sums(sums, done, self.rank, rows, y[:, :columns].T)
        if self.plan.ranks == 1:
            return
        yield
        for block in self._blocks():
            rows = self._rows(op, block)
            own = (slice(None), slice(columns), slice(rows.start, rows.stop), 0)
            first, *others = self._sums[sums].read(done, own)
            self._add(op, sum(others, first).T, layer, block, columns)

    def accept_sums(self, name: str, epoch: int, rank: int, rows: range, values: Tensor) -> None:
        """What a block of `rank` stores here: its partial sums [columns, rows]."""
        where = (rank, slice(len(values)), slice(rows.start, rows.stop), 0)
        self._sums[name].write(epoch, where, values)

    def accept_logits(self, first: int, values: Tensor) -> None:
        """What a block of any rank stores here: logits [columns, ids] from a token id on."""
        place = self._logits[: len(values), first : first + values.shape[1]]
        assert place.isnan().all(), "a logit is stored twice"
        place.copy_(values)

    def accept_best(self, column: int, rank: int, block: int, record: Tensor) -> None:
        """What a block of `rank` stores here: its best score, that token, and the round."""
        self._best[self._round % 2, column, rank * self.plan.blocks + block] = record

    def _clean_layer(self) -> None:
        """The cleaner's work at the start of gate_up."""
        done = self._layers_done
        for kept in (self._in.operand, self._in.squares):
            kept.clear(self._hidden_in + 2)
        for kept in (self._mid.operand, self._mid.squares):
            kept.clear(self._hidden_mid + 2)
        for kept in (self._projected, self._partial, self._stats, self._attended):
            kept.clear(done + 2)
        for kept in (*self._gated.values(), *self._sums.values()):
            kept.clear(done + 2)

    def _listen(self, name: str, layer: int, columns: int) -> Iterator[None]:  # noqa: ARG002
        """What other lanes told joins the residual before a module adds to it."""
        yield from ()

    def _meet(self, columns: int) -> Iterator[None]:  # noqa: ARG002
        """Lanes become one stream."""
        yield from ()

    def _until_recorded(self, columns: int) -> Iterator[None]:  # noqa: ARG002
        """Stop until all have come to their records."""
        yield

    def _head_input(self, block: int, columns: int) -> tuple[Tensor, Tensor]:
        """Activations [k, 8], and [columns] what products are multiplied by."""
        x = self._in.operand.read_for(self.plan.head, self._hidden_in, columns)
        return x, self._factor(self._in, self._hidden_in, block, columns)

    def _record(self, column: int, block: int, record: Tensor) -> None:
        """Tell all ranks."""
        for peer in self.peers:
            peer.accept_best(column, self.rank, block, record)

    def _head(self, columns: int) -> None:
        vocab = len(self._vocabulary)
        for block in self._blocks():
            rows = self._rows(self.plan.head, block)
            x, factor = self._head_input(block, columns)
            y = (self._weights(self.plan.head, 0, block) @ x)[:, :columns] * factor
            y = y[: max(0, vocab - rows.start)]
            first = self._vocabulary.start + rows.start
            for peer in self.peers:
                peer.accept_logits(first, y.T)
            for c in range(columns):
                top = float(y[:, c].max()) if len(y) else -math.inf
                ids = (y[:, c] == top).nonzero()
                lowest = first + int(ids[0]) if len(ids) else 2**32 - 1
                record = torch.tensor([top, lowest, 0, self._round + 1], dtype=torch.float64)
                self._record(c, block, record)

    def _all_logits(self, columns: int) -> Tensor:
        """[columns, V]."""
        logits = self._logits[:columns, : self.plan.model.vocab_size].clone()
        assert not logits.isnan().any(), "a logit is nobody's"
        return logits

    def _choose(self, columns: int) -> list[int]:
        records = self._best[self._round % 2, :columns]
        assert (records[:, :, 3] == self._round + 1).all(), "a record of another round"
        return [min((-float(v), int(i)) for v, i, *_ in column)[1] for column in records]

    # Attention -----------------------------------------------------------------------------------

    def _window_start(self, layer: int, position: int) -> int:
        window = self.plan.model.layers[layer].attention.window
        return max(0, position - window + 1) if window else 0

    def _splits_of(self, layer: int, position: int) -> int:
        """Blocks of a KV head that share the cache of a column: a power of 2 up to all of them."""
        seen = position - self._window_start(layer, position)
        if seen < self.plan.attention.near_positions:
            return 1
        return min(
            self.plan.attention.splits,
            1 << (seen // self.plan.attention.split_positions).bit_length(),
        )

    def _groups(
        self, layer: int, sequences: Sequence[int], positions: Sequence[int]
    ) -> Iterator[Group]:
        """All columns of a round; splits are dealt to the blocks of a head in turn."""
        columns, dealt = len(positions), layer
        splits = [self._splits_of(layer, p) for p in positions]
        kinds = list(zip(sequences, splits, strict=True))
        begin = fresh = 0
        for end in range(1, columns + 1):
            # No more columns in a group than it takes to give each block of the head a split.
            power = 1 << (columns - 1).bit_length()
            most = max(1, power * splits[begin] // self.plan.attention.splits)
            if end < columns and kinds[end] == kinds[begin] and end - begin < most:
                continue
            own, of_sequence = range(begin, end), range(fresh, end)
            ours, others = (tuple(positions[c] for c in r) for r in (own, of_sequence))
            yield Group(
                own, sequences[begin], ours, splits[begin], dealt % self.plan.attention.splits,
                of_sequence, others,
            )  # fmt: skip
            dealt += splits[begin]
            begin = end
            if end < columns and sequences[end] != sequences[fresh]:
                fresh = end

    def _splits(self, layer: int, position: int) -> list[int]:
        """The splits that hold something that a position sees, in the order of merging."""
        chunk_positions, splits = (
            self.plan.attention.chunk_pages * PAGE_POSITIONS,
            self._splits_of(layer, position),
        )
        first = self._window_start(layer, position) // chunk_positions
        count = min(splits, position // chunk_positions - first + 1)
        return [(first + i) % splits for i in range(count)]

    def _attention(
        self, layer: int, sequences: Sequence[int], positions: Sequence[int]
    ) -> Iterator[None]:
        plan = self.plan
        seen = torch.zeros(
            plan.shape.kv_heads, len(positions), max(positions) + 1, dtype=torch.int32
        )
        for block in self._blocks():
            head, place = divmod(block, plan.attention.splits)
            if head >= plan.shape.kv_heads:
                continue
            for group in self._groups(layer, sequences, positions):
                split = (place - group.first_place) % plan.attention.splits
                if split < group.splits:
                    self._attend(layer, head, split, group, seen[head])
        for c, position in enumerate(positions):
            first = self._window_start(layer, position)
            assert not seen[:, c, :first].any(), "positions before the window"
            assert (seen[:, c, first : position + 1] == 1).all(), "a position counts once"
        pieces = plan.shape.group * plan.shape.head_dim // _PIECE
        for block in self._blocks():
            head, place = divmod(block, plan.attention.splits)
            if head >= plan.shape.kv_heads:
                continue
            heads = range(head * plan.shape.group, (head + 1) * plan.shape.group)
            for c, position in enumerate(positions):
                if self._splits_of(layer, position) == 1:
                    continue
                splits = self._splits(layer, position)
                merged = self._merged(c, splits, heads).view(pieces, _PIECE)
                own = torch.arange(pieces)
                own = own[(c * pieces + own) % plan.attention.splits == place]
                k = (heads.start * plan.shape.head_dim + own[:, None] * _PIECE) + torch.arange(
                    _PIECE
                )
                self._attended.publish(
                    self._layers_done, range(c, c + 1), k.flatten(), merged[own].view(1, -1)
                )
        yield from ()

    def _prepared(self, layer: int, head: int, column: int, position: int) -> Tensor:
        """[group + 2, D]: queries, key and value of one KV head, normed, rotated and rounded."""
        plan, d = self.plan, self.plan.shape.head_dim
        attention = plan.model.layers[layer].attention
        start = head * (plan.shape.group + 2) * d
        where = (column, slice(start, start + (plan.shape.group + 2) * d), 0)
        block = (
            head * plan.attention.splits
        )  # one of those that may need them; all know the same factor
        members = self._projected.read(self._layers_done, where) * self._qkv_factor[block, column]
        members += self._vector(layer, "qkv_bias", range(where[1].start, where[1].stop))
        members = members.view(-1, d)
        rotating = members[:-1]
        if attention.qk_norm:
            q, k = (self._vector(layer, f"{x}_norm", range(d)) for x in "qk")
            mean = rotating.square().mean(1, keepdim=True)
            rotating *= (mean + plan.model.norm_epsilon).rsqrt()
            rotating *= torch.stack([*[q] * plan.shape.group, k])
        if attention.rope:
            cos, sin = self.memory.rope[position].unbind(1)
            low, high = rotating[:, : d // 2].clone(), rotating[:, d // 2 :].clone()
            rotating[:] = torch.cat([low * cos - high * sin, high * cos + low * sin], 1)
        return self._to_half(members)

    def _granule(self, layer: int, head: int, page: int, granule: int) -> Tensor:
        """[2, 32 · D], a view of the pool: keys and values of 32 positions."""
        layout = self.plan.kv_layout
        size = layout.granule_values
        start = layout.granule_place(layer, self._first_head + head, granule)
        return self.memory.pool[page].view(-1)[start : start + 2 * size].view(2, size)

    def _pages(self, split: int, splits: int, first_seen: int, last_seen: int) -> list[int]:
        """The pages of one group that a split owns."""
        pages = range(first_seen // PAGE_POSITIONS, last_seen // PAGE_POSITIONS + 1)
        return [page for page in pages if page // self.plan.attention.chunk_pages % splits == split]

    def _ordinal(self, page: int, splits: int) -> int:
        """Which of its split's pages of the whole sequence a page is."""
        chunk_pages = self.plan.attention.chunk_pages
        chunk, in_chunk = divmod(page, chunk_pages)
        return chunk // splits * chunk_pages + in_chunk

    def _attend(self, layer: int, head: int, split: int, group: Group, seen: Tensor) -> None:
        """One group's queries against the pages of one split, into its partial results."""
        plan, d = self.plan, self.plan.shape.head_dim
        first_seen = self._window_start(layer, group.positions[0])
        last_seen = group.positions[-1]
        pages = self._pages(split, group.splits, first_seen, last_seen)
        if not pages:
            return
        fresh = [
            (self._prepared(layer, head, c, p), p)
            for c, p in zip(group.fresh, group.fresh_positions, strict=True)
        ]
        heads = [x for x, _ in fresh[-len(group.columns) :]]
        queries = torch.cat([x[: plan.shape.group] for x in heads])
        last = torch.tensor(group.positions).repeat_interleave(plan.shape.group)[:, None]
        window = plan.model.layers[layer].attention.window or last_seen + 1
        lanes = [_Softmax(len(queries), d) for _ in range(plan.attention.softmax_lanes)]
        for page in pages:
            for half in range(2):
                start = page * PAGE_POSITIONS + half * GRANULE_POSITIONS
                if start > last_seen or start + GRANULE_POSITIONS <= first_seen:
                    continue
                page_id = int(self.memory.page_tables[group.sequence, page])
                keys, values = self._granule(layer, head, page_id, half)
                for x, position in fresh:
                    if start <= position < start + GRANULE_POSITIONS:
                        row = position - start
                        keys[self._key_places[row]] = x[-2].to(keys.dtype)
                        values[self._value_places[row]] = x[-1].to(keys.dtype)
                scores = queries @ keys.float()[self._key_places].T * (d**-0.5 * math.log2(math.e))
                at = start + torch.arange(GRANULE_POSITIONS)
                visible = (at <= last) & (at > last - window)
                count = min(GRANULE_POSITIONS, seen.shape[1] - start)
                own_seen = seen[group.columns.start : group.columns.stop, start : start + count]
                own_seen += visible[:: plan.shape.group, :count]
                lane = lanes[
                    (self._ordinal(page, group.splits) * 2 + half) % plan.attention.softmax_lanes
                ]
                scores = scores.masked_fill(~visible, -math.inf)
                lane.add(scores, values.float()[self._value_places], self._to_half)
        self._publish_attention(head, split, group, _merge_lanes(lanes))

    def _publish_attention(
        self, head: int, split: int, group: Group, merged: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """A near group's attention, or a far one's partial results."""
        plan = self.plan
        top, total, out = merged
        if group.splits == 1:
            finished = self._to_half(out / total[:, None]).view(len(group.columns), -1)
            k = _places(range(finished.shape[1])) + head * plan.shape.group * plan.shape.head_dim
            self._attended.publish(self._layers_done, group.columns, k, finished)
            return
        of_head = slice(head * plan.shape.group, (head + 1) * plan.shape.group)
        where = (slice(group.columns.start, group.columns.stop), of_head, split)
        by_column = (len(group.columns), plan.shape.group, -1)
        stats = torch.stack([top, total], dim=1)
        self._partial.write(self._layers_done, (*where, slice(None), 0), out.view(by_column))
        self._stats.write(self._layers_done, where, stats.view(by_column))

    def _merged(self, column: int, splits: list[int], heads: range) -> Tensor:
        """[heads, D] of a column: partial results of its splits merged and rounded."""
        own, parts = slice(heads.start, heads.stop), []
        for q in range(_MERGE_LANES):
            total, sums = torch.zeros(len(heads)), torch.zeros(len(heads), self.plan.shape.head_dim)
            top = torch.full((len(heads),), -math.inf)
            for i in range(q * _MERGE_BATCH, len(splits), _MERGE_LANES * _MERGE_BATCH):
                part = splits[i : i + _MERGE_BATCH]
                best, totals = self._stats.read(self._layers_done, (column, own, part)).unbind(2)
                values = self._partial.read(self._layers_done, (column, own, part, slice(None), 0))
                before, top = top, torch.maximum(top, best.amax(1))
                shrink, weight = (before - top).exp2(), (best - top[:, None]).exp2()
                total = total * shrink + (totals * weight).sum(1)
                sums = sums * shrink[:, None] + (values * weight[:, :, None]).sum(1)
            parts.append((top, total, sums))
        while len(parts) > 1:  # neighbours first
            parts = [_joined(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        _, total, sums = parts[0]
        return self._to_half(sums / total[:, None])


def no_records(plan: Plan) -> Tensor:
    """[2, columns, blocks of all, 4]: value, token, what the host wants, round."""
    exchanges = plan.exchanges
    best = (exchanges.told if plan.model.lanes else exchanges.workspace)["best"]
    return torch.zeros(*best.shape[:-1], 4, dtype=torch.float64)


_Partial = tuple[Tensor, Tensor, Tensor]


def _joined(a: _Partial, b: _Partial) -> _Partial:
    """Two running softmaxes as one: maximum, sum of weights, sums of values."""
    top = torch.maximum(a[0], b[0])
    weights = [(x[0] - top.nan_to_num(neginf=0.0)).exp2() for x in (a, b)]
    total = sum(x[1] * w for x, w in zip((a, b), weights, strict=True))
    sums = sum(x[2] * w[:, None] for x, w in zip((a, b), weights, strict=True))
    return top, torch.as_tensor(total), torch.as_tensor(sums)


def round_of_ranks(
    ranks: Sequence[Interpreter],
    tokens: Sequence[int],
    sequences: Sequence[int],
    positions: Sequence[int],
) -> tuple[Tensor, list[int]]:
    """(logits [columns, V], chosen tokens) of one round, run by all ranks side by side."""
    for rank in ranks:
        rank.peers = ranks
    running = [rank.stages(tokens, sequences, positions) for rank in ranks]
    outcomes: list[tuple[Tensor, list[int]]] = []
    while not outcomes:
        for stages in running:
            try:
                next(stages)
            except StopIteration as end:
                outcomes.append(end.value)
    assert len(outcomes) == len(ranks), "ranks stop together"
    logits, chosen = zip(*outcomes, strict=True)
    assert all(c == chosen[0] for c in chosen), "ranks choose alike"
    assert all(torch.equal(x, logits[0]) for x in logits), "ranks hold the same logits"
    return logits[0], chosen[0]


class _Softmax:
    """A running softmax over rows (column, query head), to base 2."""

    def __init__(self, rows: int, head_dim: int) -> None:
        self.top, self.total = torch.full((rows,), -math.inf), torch.zeros(rows)
        self.out = torch.zeros(rows, head_dim)

    def add(self, scores: Tensor, values: Tensor, rounded: Callable[[Tensor], Tensor]) -> None:
        """Scores [rows, positions], minus infinity where unseen, and values [positions, D]."""
        before, self.top = self.top, torch.maximum(self.top, scores.amax(1))
        base = self.top.nan_to_num(neginf=0.0)
        shrink, weights = (before - base).exp2(), (scores - base[:, None]).exp2()
        self.total = self.total * shrink + weights.sum(1)
        self.out = self.out * shrink[:, None] + rounded(weights) @ values


def _merge_lanes(lanes: list[_Softmax]) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima, sums of weights and sums of values of all lanes."""
    tops = torch.stack([x.top for x in lanes])
    top = tops.amax(0)
    weights = (tops - top.nan_to_num(neginf=0.0)).exp2()
    total = (torch.stack([x.total for x in lanes]) * weights).sum(0)
    return top, total, (torch.stack([x.out for x in lanes]) * weights[:, :, None]).sum(0)


def _places(rows: range) -> Tensor:
    return torch.arange(rows.start, rows.stop)


def _slot_order(steps: int, halves: range) -> Iterator[tuple[int, int]]:
    """(step, first 8 rows) of tiles as the image has them: an odd 8 rows come after two steps."""
    for first in range(0, steps, 2):
        pair = range(first, min(first + 2, steps))
        yield from ((step, half) for step in pair for half in halves[: len(halves) // 2 * 2 : 2])
        if len(halves) % 2:
            yield from ((step, halves[-1]) for step in pair)


def _tile(slot: Tensor, stored: WeightFormat, half_tiles: int, half: torch.dtype) -> Tensor:
    """The numbers [8 or 16, 512] of one or two halves of a slot.

    Args:
        slot: bytes, or values of an image without rounding.
        stored: the matrix's format.
        half_tiles: 1 for a half tile, 2 for a tile.
        half: what 16-bit values are.
    """
    if slot.dtype is not torch.uint8:
        return slot.float()[_places_16(half_tiles)]
    if stored.is_plain:
        return slot.view(half)[_places_16(half_tiles)].float()
    halves = slot.view(half_tiles, stored.half_tile_bytes)
    values = halves[:, : stored.half_tile_values_bytes].flatten().view(torch.int8)
    scales = halves[:, stored.half_tile_values_bytes :].flatten()
    numbers = values[_places_8(half_tiles)].float()
    return numbers * (scales[_scale_places(half_tiles)].float() - 127).exp2()


def _coordinates(half_tiles: int) -> tuple[Tensor, Tensor]:
    """[rows, 1] and [512]: rows and columns of one or two half tiles."""
    return torch.arange(half_tiles * HALF_TILE_ROWS)[:, None], torch.arange(STEP_COLUMNS)


@cache
def _places_16(half_tiles: int) -> Tensor:
    """[8 or 16, 512]: which of a slot's 16-bit values is which of a tile's.

    Lane (g, q) of a warp reads 16 bytes for each multiply. Of a tile these are registers 0 … 3 of
    m16n8k16's first operand: rows g and g + 8 in turn, times the two activations of the lane that
    come with the first pair, then the second. Of a half tile they are consecutive columns.
    """
    row, k = _coordinates(half_tiles)
    warp, half, quad, multiply = k // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4
    if half_tiles == 1:
        return warp * 512 + half * 256 + (row * 4 + quad) * 8 + k % 8
    lane, register = row % 8 * 4 + quad, k % 4 // 2 * 2 + row // 8
    return half * HALF_TILE_VALUES + warp * 512 + multiply * 256 + lane * 8 + register * 2 + k % 2


@cache
def _places_8(half_tiles: int) -> Tensor:
    """The same of 8-bit values: a lane's 16 bytes are those of both multiplies or halves."""
    row, k = _coordinates(half_tiles)
    warp, half, quad, multiply = k // 64, k % 64 // 32, k % 32 // 8, k % 8 // 4
    lane = row % 8 * 4 + quad
    if half_tiles == 1:
        return warp * 512 + lane * 16 + half * 8 + k % 8
    register = k % 4 // 2 * 2 + row // 8
    return half * HALF_TILE_VALUES + warp * 512 + lane * 16 + multiply * 8 + register * 2 + k % 2


@cache
def _scale_places(half_tiles: int) -> Tensor:
    """The same of scales, one for 32 columns of a row: by warp and lane's row, two to a lane."""
    row, k = _coordinates(half_tiles)
    warp, half = k // 64, k % 64 // 32
    if half_tiles == 1:
        return warp * 16 + row * 2 + half
    return half * 128 + warp * 16 + row % 8 * 2 + row // 8
