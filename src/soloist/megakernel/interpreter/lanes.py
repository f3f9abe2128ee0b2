"""The phases of Laneformer's rounds: every lane for itself, at its own pace.

A lane goes on until it needs a partial result that another has not published yet. So lanes may run
in any order, as they do on GPUs. A result must not be overwritten before all lanes received it.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soloist.megakernel.interpreter.exchange import Operand
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.interpreter.phases import Interpreter
from soloist.megakernel.interpreter.published import Published
from soloist.megakernel.interpreter.residual import Stream
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.plan import Plan
from soloist.parallel.lanes import LaneShare, modules_of, rules_of


class LaneInterpreter(Interpreter):
    """Runs rounds of a plan, as one lane.

    Args:
        plan: what to run.
        memory: weights and KV pool of the lane's rank; the pool changes.
        published: what lanes published every rank.
        dtype: what the kernel rounds exchanged values to; None for no rounding.
        lane: of all.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        published: Sequence[Published],
        dtype: torch.dtype | None,
        lane: int,
    ) -> None:
        self._lane = lane
        rank, place = divmod(lane, plan.shape.lanes_here)
        blocks, values = plan.blocks, plan.image.vector_values
        first = place * values if plan.shape.vector_lanes > 1 else 0
        own = replace(
            memory,
            image=memory.image[place * blocks : (place + 1) * blocks],
            vectors=memory.vectors[first : first + values],
            first_head=place * plan.shape.kv_heads,
        )
        super().__init__(plan, own, dtype, rank)
        self._vocabulary = self._sampled = LaneShare(plan.model, plan.shape.lanes, lane).vocabulary
        self._published, self._published_here = published, published[rank]
        self.records = self._published_here.records
        self._rules = rules_of(plan.model)
        self._modules = dict(zip(("mid", "in"), modules_of(plan.model), strict=True))
        if plan.shape.meets:
            self._out = Stream(plan, "out", dtype)

    def _publish_partial(self, name: str, epoch: int, block: int, values: Tensor) -> None:
        """A block's values [queries, rows], to all ranks."""
        rows = self._residual.rows(block)
        for rank in self._published:
            rank.publish(name, epoch, self._lane, block, rows, values)

    def _until_published(self, name: str, epoch: int, queries: int) -> Iterator[None]:
        while not self._published_here.is_there(name, epoch, queries):
            yield

    def _receive(self, name: str, epoch: int, block: int, queries: int) -> list[Tensor]:
        """[queries, rows] of every lane."""
        rows = self._residual.rows(block)
        return list(self._published_here.receive(name, epoch, block, rows, queries))

    def _lane_sum(self, name: str, epoch: int, block: int, queries: int) -> Tensor:
        """[queries, rows] of all lanes, in their order."""
        first, *others = self._receive(name, epoch, block, queries)
        return sum(others, first)

    def _join(
        self, op: Operation, operand: Operand, name: str, layer: int, queries: int
    ) -> Iterator[None]:
        """The product joins the residual: alone, or as the sum over lanes in their order."""
        module, published, epoch = self._modules[name], f"published_{name}", self._layers_done
        x = operand.read_for(op, epoch, queries)
        products = [self._product(op, x, layer, block, queries) for block in self._blocks]
        if module.publishes(layer):
            for block, y in enumerate(products):
                self._publish_partial(published, epoch, block, y.T)
        if module.sums(layer):
            yield from self._until_published(published, epoch, queries)
            products = [self._lane_sum(published, epoch, b, queries).T for b in self._blocks]
        elif not module.receives(layer):
            products = [y * math.sqrt(self._rules.num_lanes) for y in products]
        for block, y in enumerate(products):
            self._residual.add(op, y, layer, block)

    def _listen(self, name: str, layer: int, queries: int) -> Iterator[None]:
        """See Interpreter; `layer` is the module's: it receives those of `delay_layers` before."""
        if layer == self._plan.model.num_layers or not self._modules[name].receives(layer):
            return
        ahead = 1 if name == "mid" else 0  # the next layer's
        epoch = self._layers_done + ahead - self._rules.delay_layers
        yield from self._until_published(f"published_{name}", epoch, queries)
        for block in self._blocks:
            published = self._receive(f"published_{name}", epoch, block, queries)
            others = [x for lane, x in enumerate(published) if lane != self._lane]
            part = self._residual.part(block, queries)
            part += sum(others, torch.zeros_like(part))

    def _meet(self, queries: int) -> Iterator[None]:
        """See Interpreter: the mean of normalised streams, or the norm of their sum."""
        if not self._plan.shape.meets:
            return
        epoch, layers = self._round + 1, self._plan.model.num_layers
        for block in self._blocks:
            part = self._residual.part(block, queries)
            published = part if self._rules.sum_before_norm else self._normed(block, part)
            self._publish_partial("published_out", epoch, block, published)
        yield from self._until_published("published_out", epoch, queries)
        sums = [self._lane_sum("published_out", epoch, block, queries) for block in self._blocks]
        if self._rules.sum_before_norm:
            for block, total in enumerate(sums):
                self._residual.part(block, queries).copy_(total)
            self._residual.publish(self._out, queries, layers, "final_norm")
        else:
            self._publish_mean(sums)

    def _normed(self, block: int, x: Tensor) -> Tensor:
        """A block's rows [queries, rows] of the lane's residual."""
        self._residual.factor(self._in, block, len(x))
        rows, layers = self._residual.rows(block), self._plan.model.num_layers
        norm = self._weights.vector(layers, "final_norm", rows)
        return x * norm * self._residual.scale[block, : len(x), None]

    def _publish_mean(self, sums: Sequence[Tensor]) -> None:
        """Of all lanes' normed residuals, by block [queries, rows]."""
        self._out.epoch += 1
        for block, total in enumerate(sums):
            mean, rows = total / self._rules.num_lanes, self._residual.rows(block)
            self._out.operand.publish(self._out.epoch, range(len(mean)), rows, mean)

    def _head_input(self, block: int, queries: int) -> tuple[Tensor, Tensor]:
        """See Interpreter."""
        if not self._plan.shape.meets:
            return super()._head_input(block, queries)
        x = self._out.read_for(self._plan.head, queries)
        if self._rules.sum_before_norm:
            return x, self._residual.factor(self._out, block, queries)
        return x, torch.ones(queries)

    def _record(self, query: int, block: int, best: tuple[float, int]) -> None:
        """See Interpreter."""
        place = self._lane * self._plan.blocks + block
        for rank in self._published:
            rank.records.write(self._round, query, place, best)

    def _until_recorded(self, queries: int) -> Iterator[None]:
        """See Interpreter."""
        while not self.records.are_there(self._round, queries):
            yield
        if self._plan.shape.meets:
            self._out.clear()


def lanes_of_plan(
    plan: Plan, memories: Sequence[Memory], dtype: torch.dtype | None = None
) -> list[LaneInterpreter]:
    """All lanes of a launch, over the memories of all ranks."""
    published = [Published(plan) for _ in range(plan.ranks)]
    return [
        LaneInterpreter(plan, memories[lane // plan.shape.lanes_here], published, dtype, lane)
        for lane in range(plan.shape.lanes)
    ]


def round_of_lanes(
    lanes: Sequence[LaneInterpreter],
    tokens: Sequence[int],
    sequences: Sequence[int],
    positions: Sequence[int],
    order: random.Random | None = None,
) -> tuple[Tensor, list[int]]:
    """(logits [queries, V], chosen tokens) of one round.

    Args:
        lanes: of one launch.
        tokens: as of `Interpreter.stages`, like the next two.
        sequences: of the queries.
        positions: of the queries.
        order: who goes on next, as far as it gets; None: one after the other, a stop at a time.
    """
    running = {i: x.stages(tokens, sequences, positions) for i, x in enumerate(lanes)}
    outcomes: dict[int, tuple[Tensor, list[int]]] = {}
    idle = 0
    while running:
        next_up = list(running) if order is None else [order.choice(list(running))]
        for lane in next_up:
            try:
                next(running[lane])
                idle += 1
            except StopIteration as end:
                outcomes[lane] = end.value
                del running[lane]
                idle = 0
        assert idle < 1000 * len(lanes), "lanes wait for each other"
    logits, chosen = zip(*(outcomes[i] for i in sorted(outcomes)), strict=True)
    assert all(c == chosen[0] for c in chosen), "lanes choose alike"
    return torch.cat(logits, dim=1), chosen[0]
