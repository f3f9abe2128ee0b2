"""The decode kernel's arithmetic of Laneformer on the CPU: every lane for itself, at its own pace.

A lane goes on until it needs what another has not told yet. So lanes may run in any order, as they
do on GPUs, and it is checked that nothing is overwritten which somebody still has to hear.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soloist.megakernel.interpreter import Exchange as Values
from soloist.megakernel.interpreter import Interpreter, Memory, Operand, Stream, no_records
from soloist.megakernel.lanes import modules_of, rules_of, vocabulary_of
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.plan import Plan


class Told:
    """What all lanes told one rank: each value with the turn that it is of.

    Args:
        plan: its buffers' sizes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.best = no_records(plan)
        self._modules = dict(zip(("told_mid", "told_in"), modules_of(plan.model), strict=True))
        self._values: dict[str, Tensor] = {}
        self._turns: dict[str, Tensor] = {}
        for name, buffer in plan.exchanges.told.items():
            if name != "best":
                *shape, _ = buffer.shape
                shape = shape if name in self._modules else [1, *shape]
                self._values[name] = torch.full(shape, torch.nan)
                self._turns[name] = torch.full(shape, -1)
        self._heard: Counter[tuple[str, int, int]] = Counter()  # by buffer, turn and block

    def tell(self, name: str, turn: int, lane: int, block: int, rows: range, x: Tensor) -> None:
        """Store a block's values [columns, rows]."""
        turns = self._turns[name]
        where = (turn % len(turns), lane, slice(len(x)), slice(rows.start, rows.stop))
        before = set(turns[where].unique().tolist()) - {-1}
        assert all(self._nobody_needs(name, old, block) for old in before), f"{name}: overwritten"
        assert turn not in before, f"{name}: told twice"
        self._values[name][where], turns[where] = x, turn

    def is_there(self, name: str, turn: int, columns: int) -> bool:
        """All lanes have told everything of a turn."""
        turns = self._turns[name]
        return bool((turns[turn % len(turns), :, :columns] == turn).all())

    def hear(self, name: str, turn: int, block: int, rows: range, columns: int) -> Tensor:
        """[lanes, columns, rows] of a turn."""
        turns, self._heard[name, turn, block] = (
            self._turns[name],
            self._heard[name, turn, block] + 1,
        )
        where = (turn % len(turns), slice(None), slice(columns), slice(rows.start, rows.stop))
        assert (turns[where] == turn).all(), f"{name}: heard before it is told"
        return self._values[name][where]

    def _nobody_needs(self, name: str, turn: int, block: int) -> bool:
        times = 1
        if name in self._modules:
            module, layer = self._modules[name], (turn - 1) % self._plan.model.num_layers
            later = layer + module.lanes.delay_layers
            heard_later = later < self._plan.model.num_layers and module.hears(later)
            times = int(module.sums(layer)) + int(heard_later)
        return self._heard[name, turn, block] == times * self._plan.shape.lanes_here


class LaneInterpreter(Interpreter):
    """Runs rounds of a plan, as one lane.

    Args:
        plan: what to run.
        memory: weights and KV pool of the lane's rank; the pool changes.
        told: what lanes told every rank.
        dtype: what the kernel rounds exchanged values to; None for no rounding.
        lane: of all.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        told: Sequence[Told],
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
        )
        super().__init__(plan, own, dtype, rank)
        self._vocabulary = vocabulary_of(plan.model, lane)
        self._first_head = place * plan.shape.kv_heads
        self._told, self._told_here = told, told[rank]
        self._best = self._told_here.best
        self._rules = rules_of(plan.model)
        self._modules = dict(zip(("mid", "in"), modules_of(plan.model), strict=True))
        if plan.shape.meets:
            self._out = Stream(Operand(plan, "hidden_out"), Values(plan, "squares_out", 4))

    def _tell(self, name: str, turn: int, block: int, values: Tensor) -> None:
        rows = self._rows(self._hidden, block)
        for rank in self._told:
            rank.tell(name, turn, self._lane, block, rows, values)

    def _until_told(self, name: str, turn: int, columns: int) -> Iterator[None]:
        while not self._told_here.is_there(name, turn, columns):
            yield

    def _hear(self, name: str, turn: int, block: int, columns: int) -> list[Tensor]:
        """[columns, rows] of every lane."""
        rows = self._rows(self._hidden, block)
        return list(self._told_here.hear(name, turn, block, rows, columns))

    def _join(
        self, op: Operation, operand: Operand, sums: str, layer: int, columns: int
    ) -> Iterator[None]:
        """The product joins the residual: alone, or as the sum over lanes in their order."""
        kind = sums.removeprefix("sums_")
        module, name, turn = self._modules[kind], f"told_{kind}", self._layers_done
        partials = [
            self._weights(op, layer, block) @ operand.read_for(op, turn, columns)
            for block in self._blocks()
        ]
        if module.tells(layer):
            for block, y in enumerate(partials):
                self._tell(name, turn, block, y[:, :columns].T)
        if module.sums(layer):
            yield from self._until_told(name, turn, columns)
        for block, y in enumerate(partials):
            if module.sums(layer):
                first, *others = self._hear(name, turn, block, columns)
                self._add(op, sum(others, first).T, layer, block, columns)
            else:
                scale = 1.0 if module.hears(layer) else math.sqrt(self._rules.num_lanes)
                self._add(op, y * scale, layer, block, columns)

    def _listen(self, name: str, layer: int, columns: int) -> Iterator[None]:
        """See Interpreter; `layer` is that of the module, which hears of `delay_layers` before."""
        if layer == self.plan.model.num_layers or not self._modules[name].hears(layer):
            return
        ahead = 1 if name == "mid" else 0  # the next layer's
        turn = self._layers_done + ahead - self._rules.delay_layers
        yield from self._until_told(f"told_{name}", turn, columns)
        for block in self._blocks():
            told = self._hear(f"told_{name}", turn, block, columns)
            others = [x for lane, x in enumerate(told) if lane != self._lane]
            rows = len(self._rows(self._hidden, block))
            self._residual[block, :columns, :rows] += sum(others, torch.zeros(columns, rows))

    def _meet(self, columns: int) -> Iterator[None]:
        """See Interpreter: the mean of normalised streams, or the norm of their sum."""
        plan, turn = self.plan, self._round + 1
        if not plan.shape.meets:
            return
        for block in self._blocks():
            rows = self._rows(self._hidden, block)
            x = self._residual[block, :columns, : len(rows)]
            if not self._rules.sum_before_norm:
                self._factor(self._in, self._hidden_in, block, columns)
                norm = self._vector(plan.model.num_layers, "final_norm", rows)
                x = x * norm * self._scale[block, :columns, None]
            self._tell("told_out", turn, block, x)
        yield from self._until_told("told_out", turn, columns)
        for block in self._blocks():
            rows = self._rows(self._hidden, block)
            first, *others = self._hear("told_out", turn, block, columns)
            total = sum(others, first)
            if self._rules.sum_before_norm:
                self._residual[block, :columns, : len(rows)] = total
                self._publish(self._out, turn, block, columns, plan.model.num_layers, "final_norm")
            else:
                mean = self._to_half(total / self._rules.num_lanes)
                k = torch.arange(rows.start, rows.stop)
                self._out.operand.publish(turn, range(columns), k, mean)

    def _head_input(self, block: int, columns: int) -> tuple[Tensor, Tensor]:
        """See Interpreter."""
        if not self.plan.shape.meets:
            return super()._head_input(block, columns)
        turn = self._round + 1
        x = self._out.operand.read_for(self.plan.head, turn, columns)
        if self._rules.sum_before_norm:
            return x, self._factor(self._out, turn, block, columns)
        return x, torch.ones(columns)

    def _all_logits(self, columns: int) -> Tensor:
        """[columns, rows] of the lane's part of the vocabulary."""
        own = self._vocabulary
        logits = self._logits[:columns, own.start : own.stop].clone()
        assert not logits.isnan().any(), "a logit is nobody's"
        return logits

    def _record(self, column: int, block: int, record: Tensor) -> None:
        """See Interpreter."""
        for rank in self._told:
            place = self._lane * self.plan.blocks + block
            rank.best[self._round % 2, column, place] = record

    def _until_recorded(self, columns: int) -> Iterator[None]:
        """See Interpreter."""
        while not (self._best[self._round % 2, :columns, :, 3] == self._round + 1).all():
            yield
        if self.plan.shape.meets:
            self._out.operand.clear(self._round + 3)
            self._out.squares.clear(self._round + 3)


def lanes_of_plan(
    plan: Plan, memories: Sequence[Memory], dtype: torch.dtype | None = None
) -> list[LaneInterpreter]:
    """All lanes of a launch, over the memories of all ranks."""
    told = [Told(plan) for _ in range(plan.ranks)]
    return [
        LaneInterpreter(plan, memories[lane // plan.shape.lanes_here], told, dtype, lane)
        for lane in range(plan.shape.lanes)
    ]


def round_of_lanes(
    lanes: Sequence[LaneInterpreter],
    tokens: Sequence[int],
    sequences: Sequence[int],
    positions: Sequence[int],
    order: random.Random | None = None,
) -> tuple[Tensor, list[int]]:
    """(logits [columns, V], chosen tokens) of one round.

    Args:
        lanes: of one launch.
        tokens: as of `Interpreter.round`, like the next two.
        sequences: of the columns.
        positions: of the columns.
        order: who goes on next, as far as it gets; None: one after the other, a stop at a time.
    """
    running = {i: x.stages(tokens, sequences, positions) for i, x in enumerate(lanes)}
    outcomes: dict[int, tuple[Tensor, list[int]]] = {}
    idle = 0
    while running:
        turn = list(running) if order is None else [order.choice(list(running))]
        for lane in turn:
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
