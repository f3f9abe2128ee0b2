"""The phases of a layer with experts: router, what all tokens take, choice, gate_up, down."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.megakernel.experts import Experts
from soloist.megakernel.interpreter.exchange import Exchange, Operand
from soloist.megakernel.interpreter.residual import Residual, Stream
from soloist.megakernel.interpreter.weights import Weights
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import HALF_TILE_ROWS
from soloist.model.config import Router


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the queries of a round chose in a layer.

    Attributes:
        shares: of each query, the share of each expert that it chose.
        of_shared: by query, what the result of the MLP beside them is multiplied by.
    """

    shares: tuple[dict[int, float], ...]
    of_shared: tuple[float, ...] = ()

    @property
    def slots(self) -> list[int]:
        """The distinct experts, in ascending order."""
        return sorted({expert for of_query in self.shares for expert in of_query})

    def queries(self, expert: int) -> list[int]:
        """Which queries chose an expert."""
        return [query for query, of_query in enumerate(self.shares) if expert in of_query]


def best_of(ranks: Tensor, count: int) -> list[int]:
    """Where the largest are, in order: of equals the lower index, what is no number last."""
    values = ranks.tolist()
    order = sorted(
        range(len(values)),
        key=lambda e: (-values[e] if not math.isnan(values[e]) else math.inf, e),
    )
    return order[:count]


def chosen_by(router: Router, logits: Tensor, correction: Tensor) -> dict[int, float]:
    """The experts that logits [E] choose, in ascending order, and their shares."""
    if router.scores == "softmax":
        powers = (logits - logits.max()).exp()
        scores = powers / powers.sum()
    else:
        scores = 1 / (1 + (-logits).exp())
    experts = sorted(best_of(scores + correction, router.num_chosen))
    shares = scores[experts]
    if router.normalises:
        shares = shares / (shares.sum() + router.least_sum)
    return dict(zip(experts, (shares * router.scale).tolist(), strict=True))


def _products(rows: Tensor, x: Tensor) -> Tensor:
    """[queries, rows]: a query at a time, as products of several may be summed otherwise."""
    return torch.stack([rows @ of_query for of_query in x.T.contiguous()])


class ExpertPhases:
    """What blocks do in layers with experts.

    Args:
        plan: who reads what.
        weights: of the rank.
        residual: knows by what products with the published stream are multiplied.
        rank: whose weights they are.

    Attributes:
        logits: of experts; where they come early, a part of each rank.
    """

    def __init__(self, plan: Plan, weights: Weights, residual: Residual, rank: int = 0) -> None:
        self._plan, self._weights, self._residual, self._rank = plan, weights, residual, rank
        self.logits = Exchange(plan, "expert_logits") if plan.has_experts else None
        self._chosen = Chosen(())
        self._factor = torch.zeros(plan.blocks, MAX_QUERIES)

    def _experts(self, layer: int) -> Experts:
        experts = self._plan.image.layer(layer).experts
        assert experts is not None, "the layer has experts"
        return experts

    def route(self, stream: Stream, layer: int, epoch: int, queries: int) -> None:
        """Blocks publish logits of their rows; all of them come to the same choice."""
        experts, hidden, logits = self._experts(layer), self._plan.model.hidden_size, self.logits
        assert logits is not None, "there are experts"
        op = self._plan.image.operation(layer, "gate_up")
        routes_early = self._plan.image.layer(layer).routes_early
        x = stream.read_for(op, queries)[:hidden, :queries]
        for block in range(self._plan.blocks):
            factor = self._residual.factor(stream, block, queries)
            self._factor[block, :queries] = factor
            if routes_early:
                continue
            rows = experts.router_rows(block)
            router = self._router(layer, rows)
            where = (0, slice(queries), slice(rows.start, rows.stop), 0)
            logits.write(epoch, where, _products(router, x) * factor[:, None])
        count = experts.router.num_experts
        parts = slice(self._plan.ranks if routes_early else 1)
        first, *others = logits.read(
            epoch, (parts, slice(queries), slice(experts.num_logits), 0)
        ).unbind()
        everyones = sum(others, first)
        if routes_early:  # the norm of the residual, which is the same in all blocks
            everyones = everyones * self._residual.scale[0, :queries, None]
        correction = self._weights.vector(layer, "router_correction", range(count))
        gates = [float(torch.sigmoid(own[count])) for own in everyones if experts.gates_shared]
        self._chosen = Chosen(
            tuple(chosen_by(experts.router, own[:count], correction) for own in everyones),
            tuple(gates) or (1.0,) * queries,
        )

    def route_early(
        self,
        stream: Stream,
        attended: Operand,
        layer: int,
        epoch: int,
        queries: int,
        peers: Sequence["ExpertPhases"],
    ) -> None:
        """Blocks publish logits of their rows from the stream before attention and from attention.

        Without the residual's norm, which `route` knows. Of several ranks (`peers`) each publishes
        to all what its part of attention gives, and the first one adds the stream's.
        """
        experts, model = self._experts(layer), self._plan.model
        assert stream.for_routers is not None, "it is published for them"
        qkv, output = (self._plan.image.operation(layer, n) for n in ("qkv", "attention_output"))
        columns = output.matrix.columns
        x = stream.for_routers.read_for(qkv, stream.epoch, queries)[: model.hidden_size, :queries]
        a = attended.read_for(output, epoch, queries)[:columns, :queries]
        assumed = stream.squares.read(stream.epoch, (slice(queries),))[:, 0, 1]
        for block in range(self._plan.blocks):
            rows = experts.router_rows(block)
            values = range(rows.start * columns, rows.stop * columns)
            product = self._weights.vector(layer, "router_output", values).view(-1, columns)
            of_stream = _products(self._router(layer, rows), x) / assumed[:, None]
            own = _products(product, a) + (of_stream if self._rank == 0 else 0)
            where = (self._rank, slice(queries), slice(rows.start, rows.stop), 0)
            for peer in peers:
                assert peer.logits is not None, "there are experts"
                peer.logits.write(epoch, where, own)

    def _router(self, layer: int, rows: range) -> Tensor:
        """Some of its rows, behind which a gate's may lie."""
        hidden = self._plan.model.hidden_size
        values = range(rows.start * hidden, rows.stop * hidden)
        (count,) = self._plan.image.layer(layer).vectors["router"].shape
        gate = range(max(0, values.start - count), max(0, values.stop - count))
        rows = range(min(values.start, count), min(values.stop, count))
        vectors = (("router", rows), ("shared_gate", gate))
        found = torch.cat([self._weights.vector(layer, *vector) for vector in vectors])
        return found.view(-1, hidden)

    def gate_up(self, x: Tensor, gated: Operand, layer: int, epoch: int) -> None:
        """Each block's tiles of the slots; a slot's neurons go to the queries that chose it."""
        experts, slots = self._experts(layer), self._chosen.slots
        op, blocks = self._plan.image.operation(layer, "gate_up"), range(self._plan.blocks)
        for block in blocks:
            for slot, tile in experts.tiles(block, len(slots)):
                queries = self._chosen.queries(slots[slot])
                y = self._weights.expert_product(op, x, layer, slots[slot], tile)[:, queries]
                y = y * self._factor[block, queries]
                gate, up = y.split(HALF_TILE_ROWS)
                start = slot * experts.slot_columns + tile * HALF_TILE_ROWS
                neurons = range(start, start + HALF_TILE_ROWS)
                values = torch.nn.functional.silu(gate) * up
                gated.publish(epoch, queries, neurons, values.T)

    def down(
        self, gated: Operand, layer: int, epoch: int, shared: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Of every block [rows, queries]: the sums of its rows over the experts, ascending.

        `shared`, of every block, is what the MLP gives that all tokens take: it comes first.
        """
        experts, slots = self._experts(layer), self._chosen.slots
        op = self._plan.image.operation(layer, "down")
        x_of = [self._activations(gated, slot, layer, epoch) for slot in range(len(slots))]
        totals = []
        for block in range(self._plan.blocks):
            rows = op.matrix.num_units(block) * HALF_TILE_ROWS
            total = torch.zeros(rows, len(self._chosen.shares))
            if shared is not None:
                total += shared[block] * torch.tensor(self._chosen.of_shared)
            for expert, x in zip(slots, x_of, strict=True):
                y = self._weights.expert_product(op, x, layer, expert, block)
                for query in self._chosen.queries(expert):
                    total[:, query] += y[:, query] * self._chosen.shares[query][expert]
            totals.append(total)
        assert len(slots) <= experts.most_slots(len(self._chosen.shares)), "slots"
        return totals

    def _activations(self, gated: Operand, slot: int, layer: int, epoch: int) -> Tensor:
        """[columns, 8] of a slot, zeros for queries that did not choose it."""
        experts = self._experts(layer)
        out = torch.zeros(experts.slot_columns, MAX_QUERIES)
        first, last = slot * experts.slot_columns // 32, (slot + 1) * experts.slot_columns // 32
        for query in self._chosen.queries(self._chosen.slots[slot]):
            out[:, query] = gated.read(epoch, (slice(first, last), query)).flatten()
        return out

    def clear(self, epoch: int) -> None:
        """See Exchange."""
        if self.logits is not None:
            self.logits.clear(epoch)
