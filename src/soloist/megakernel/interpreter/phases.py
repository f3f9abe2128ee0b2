"""The phases of a round, as one rank runs them, and rounds of several ranks."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor

from soloist.megakernel.interpreter.attention import Attention
from soloist.megakernel.interpreter.exchange import Exchange, Operand
from soloist.megakernel.interpreter.experts import ExpertPhases
from soloist.megakernel.interpreter.logits import Logits, Records
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.interpreter.projection import Projection
from soloist.megakernel.interpreter.residual import Residual, Stream
from soloist.megakernel.interpreter.weights import Weights, rows_of
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import phases_of


class Interpreter:
    """Runs rounds of a plan, as one rank. One object is one launch.

    Args:
        plan: what to run.
        memory: weights and KV pool of the rank; the pool changes.
        dtype: what the kernel rounds exchanged values to; None for no rounding.
        rank: whose memory it is.

    Attributes:
        peers: all ranks.
        sums: by name, partial sums that ranks publish; none where there is one rank.
        logits: published by all ranks, too.
        records: the same.
    """

    def __init__(
        self, plan: Plan, memory: Memory, dtype: torch.dtype | None = None, rank: int = 0
    ) -> None:
        self._plan, self._rank = plan, rank
        self._blocks = range(plan.blocks)
        self._vocabulary = plan.part_of(rank).vocabulary
        self._sampled = range(plan.model.vocab_size)  # token ids
        self.peers: Sequence[Interpreter] = [self]
        workspace = plan.exchanges.workspace
        self.sums = {name: Exchange(plan, name) for name in workspace if name.startswith("sums")}
        self.logits, self.records = Logits(plan), Records(plan)
        self._weights = Weights(plan, memory, dtype)
        self._residual = Residual(plan, self._weights)
        self._in, self._mid = Stream(plan, "in", dtype), Stream(plan, "mid", dtype)
        self._projection = Projection(plan, self._weights, memory.rope, dtype)
        self._attention = Attention(plan, memory, self._projection, dtype)
        names = {plan.exchanges.gated(kind) for kind in plan.image.kinds}
        kinds = plan.image.kinds
        names |= {plan.exchanges.shared_gated(k) for k in kinds if "shared.down" in k.operations}
        self._gated = {name: Operand(plan, name, dtype) for name in names}
        self._experts = ExpertPhases(plan, self._weights, self._residual, rank)
        self._layers_done = self._round = 0

    @torch.inference_mode()
    def stages(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> Generator[None, None, tuple[Tensor, list[int]]]:
        """The round of one rank; stops where others have to come as far.

        Args:
            tokens: of the queries.
            sequences: of the queries; those of a sequence are side by side.
            positions: of the queries.

        Returns:
            Logits [queries, V] of all ranks as they lie here, and the chosen tokens.
        """
        queries = len(tokens)
        assert len(sequences) == len(positions) == queries <= MAX_QUERIES, "queries"
        self._residual.embed(tokens)
        self._residual.publish(self._in, queries, 0, "attention_norm")
        for layer in range(self._plan.model.num_layers):
            yield from self._layer(layer, sequences, positions)
        yield from self._meet(queries)
        self.logits.clear()
        yield
        self._head(queries)
        yield from self._until_recorded(queries)
        logits = self.logits.read(queries, self._sampled)
        chosen = self.records.choose(self._round, queries)
        self._in.clear()
        self._round += 1
        return logits, chosen

    def _layer(
        self, layer: int, sequences: Sequence[int], positions: Sequence[int]
    ) -> Iterator[None]:
        queries = len(positions)
        self._layers_done += 1
        done = self._layers_done
        run: dict[str, Callable[[], Iterator[None] | None]] = {
            "qkv": lambda: self._qkv(layer, queries),
            "attention": lambda: self._attention.run(layer, done, sequences, positions),
            "attention_output": lambda: self._attention_output(layer, queries),
            "router": lambda: self._router(layer, queries),
            "gate_up": lambda: self._gate_up(layer, queries),
            "down": lambda: self._down(layer, queries),
        }
        for phase in phases_of(self._plan.model.layers[layer]):
            yield from run[phase.name]() or ()

    def _op(self, layer: int, name: str) -> Operation:
        return self._plan.image.operation(layer, name)

    def _product(self, op: Operation, x: Tensor, layer: int, block: int, queries: int) -> Tensor:
        """[rows, columns] of a block; what the multiply gives for other queries is left."""
        return self._weights.product(op, x, layer, block)[:, :queries]

    def _qkv(self, layer: int, queries: int) -> None:
        op = self._op(layer, "qkv")
        x = self._in.read_for(op, queries)
        for block in self._blocks:
            y = self._product(op, x, layer, block, queries)
            factor = self._residual.factor(self._in, block, queries)
            self._projection.publish(self._layers_done, block, rows_of(op, block), y.T, factor)

    def _attention_output(self, layer: int, queries: int) -> Iterator[None]:
        op, attended = self._op(layer, "attention_output"), self._attention.attended
        if self._plan.image.layer(layer).routes_early:
            peers = [peer._experts for peer in self.peers]  # noqa: SLF001 - all are one launch
            self._experts.route_early(self._in, attended, layer, self._layers_done, queries, peers)
        yield from self._join(op, attended, "mid", layer, queries)
        self._residual.publish(self._mid, queries, layer, "mlp_norm")
        yield from self._listen("in", layer, queries)

    def _gate_up(self, layer: int, queries: int) -> None:
        self._clear()
        op = self._op(layer, "gate_up")
        x = self._mid.read_for(op, queries)
        if self._plan.image.layer(layer).experts is not None:
            self._experts.gate_up(x, self._gated_in(layer), layer, self._layers_done)
            return
        self._publish_gated(op, x, self._gated_in(layer), layer, queries)

    def _publish_gated(
        self, op: Operation, x: Tensor, gated: Operand, layer: int, queries: int
    ) -> None:
        """silu(gate) · up of every block's neurons of an MLP."""
        for block in self._blocks:
            rows = rows_of(op, block)
            y = self._product(op, x, layer, block, queries)
            y = y * self._residual.factor(self._mid, block, queries)
            y = y + self._weights.vector(layer, f"{op.matrix.name}_bias", rows)[:, None]
            y = y.unflatten(0, (-1, 2, op.matrix.unit_neurons))
            gate, up = y[:, 0].flatten(0, 1), y[:, 1].flatten(0, 1)
            neurons = range(rows.start // 2, rows.stop // 2)
            values = torch.nn.functional.silu(gate) * up
            gated.publish(self._layers_done, range(queries), neurons, values.T)

    def _router(self, layer: int, queries: int) -> None:
        """The choice of experts, and gate_up of the MLP beside them."""
        self._experts.route(self._mid, layer, self._layers_done, queries)
        kind = self._plan.image.layer(layer)
        if (op := kind.operations.get("shared.gate_up")) is not None:
            x = self._mid.read_for(op, queries)
            gated = self._gated[self._plan.exchanges.shared_gated(kind)]
            self._publish_gated(op, x, gated, layer, queries)

    def _shared_down(self, layer: int, queries: int) -> list[Tensor] | None:
        """What every block's rows of the MLP beside experts give; None where there is none."""
        kind = self._plan.image.layer(layer)
        if (op := kind.operations.get("shared.down")) is None:
            return None
        gated = self._gated[self._plan.exchanges.shared_gated(kind)]
        x = gated.read_for(op, self._layers_done, queries)
        return [self._product(op, x, layer, block, queries) for block in self._blocks]

    def _down(self, layer: int, queries: int) -> Iterator[None]:
        op = self._op(layer, "down")
        yield from self._join(op, self._gated_in(layer), "in", layer, queries)
        last = layer + 1 == self._plan.model.num_layers
        norm = "final_norm" if last else "attention_norm"
        self._residual.publish(self._in, queries, layer + 1, norm)
        yield from self._listen("mid", layer + 1, queries)

    def _gated_in(self, layer: int) -> Operand:
        return self._gated[self._plan.exchanges.gated(self._plan.image.layer(layer))]

    def _join(
        self, op: Operation, operand: Operand, name: str, layer: int, queries: int
    ) -> Iterator[None]:
        """The product joins the residual, ranks summed in order; `name` of its next reader."""
        done = self._layers_done
        if name == "in" and self._plan.image.layer(layer).experts is not None:
            shared = self._shared_down(layer, queries)
            products = self._experts.down(operand, layer, done, shared)
        else:
            x = operand.read_for(op, done, queries)
            products = [self._product(op, x, layer, block, queries) for block in self._blocks]
        if self._plan.ranks > 1:
            for block, y in enumerate(products):
                self._publish_sums(f"sums_{name}", rows_of(op, block), y)
            yield
            all_rows = (rows_of(op, block) for block in self._blocks)
            products = [self._received_sum(f"sums_{name}", rows, queries) for rows in all_rows]
        for block, y in enumerate(products):
            self._residual.add(op, y, layer, block)

    def _publish_sums(self, name: str, rows: range, product: Tensor) -> None:
        """Partial sums [rows, columns], to all ranks."""
        where = (self._rank, slice(product.shape[1]), slice(rows.start, rows.stop), 0)
        for peer in self.peers:
            peer.sums[name].write(self._layers_done, where, product.T)

    def _received_sum(self, name: str, rows: range, queries: int) -> Tensor:
        """[rows, columns] from all ranks, in their order."""
        where = (slice(None), slice(queries), slice(rows.start, rows.stop), 0)
        first, *others = self.sums[name].read(self._layers_done, where).unbind()
        return sum(others, first).T

    def _clear(self) -> None:
        """The cleaner's work at the start of gate_up."""
        self._in.clear()
        self._mid.clear()
        epoch = self._layers_done + 2
        self._projection.clear(epoch)
        self._attention.clear(epoch)
        self._experts.clear(epoch)
        for kept in (*self._gated.values(), *self.sums.values()):
            kept.clear(epoch)

    def _listen(self, name: str, layer: int, queries: int) -> Iterator[None]:  # noqa: ARG002
        """What other lanes published joins the residual before a module adds to it."""
        yield from ()

    def _meet(self, queries: int) -> Iterator[None]:  # noqa: ARG002
        """Lanes become one stream."""
        yield from ()

    def _until_recorded(self, queries: int) -> Iterator[None]:  # noqa: ARG002
        """Stop until all have come to their records."""
        yield

    def _head_input(self, block: int, queries: int) -> tuple[Tensor, Tensor]:
        """Activations [k, 8], and [queries] what products are multiplied by."""
        x = self._in.read_for(self._plan.head, queries)
        return x, self._residual.factor(self._in, block, queries)

    def _record(self, query: int, block: int, best: tuple[float, int]) -> None:
        """Publish a block's best logit and its token to all ranks."""
        place = self._rank * self._plan.blocks + block
        for peer in self.peers:
            peer.records.write(self._round, query, place, best)

    def _head(self, queries: int) -> None:
        for block in self._blocks:
            x, factor = self._head_input(block, queries)
            y = self._product(self._plan.head, x, 0, block, queries) * factor
            start = rows_of(self._plan.head, block).start
            logits = y[: max(0, len(self._vocabulary) - start)].T
            first = self._vocabulary.start + start
            for peer in self.peers:
                peer.logits.write(first, logits)
            for query, of_query in enumerate(logits):
                self._record(query, block, _best(of_query, first))


def _best(logits: Tensor, first: int) -> tuple[float, int]:
    """The largest and the lowest of its tokens; where there is none, what is worse than any."""
    top = float(logits.max()) if len(logits) else -math.inf
    places = (logits == top).nonzero()
    return top, first + int(places[0]) if len(places) else 2**32 - 1


def round_of_ranks(
    ranks: Sequence[Interpreter],
    tokens: Sequence[int],
    sequences: Sequence[int],
    positions: Sequence[int],
) -> tuple[Tensor, list[int]]:
    """(logits [queries, V], chosen tokens) of one round, run by all ranks side by side.

    Args:
        ranks: of one launch.
        tokens: as of `Interpreter.stages`, like the next two.
        sequences: of the queries.
        positions: of the queries.
    """
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
