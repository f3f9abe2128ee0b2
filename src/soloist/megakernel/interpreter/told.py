"""What lanes tell each other, as it lies in one rank."""

from collections import Counter

import torch
from torch import Tensor

from soloist.megakernel.interpreter.logits import Records
from soloist.megakernel.lanes import modules_of
from soloist.megakernel.plan import Plan


class Told:
    """What all lanes told one rank: each value with the turn that it is of.

    Args:
        plan: its buffers' sizes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.records = Records(plan)
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
        turns = self._turns[name]
        self._heard[name, turn, block] += 1
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
