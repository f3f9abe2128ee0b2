"""Partial results that lanes publish for each other, as they lie in one rank."""

from collections import Counter

import torch
from torch import Tensor

from soloist.megakernel.interpreter.logits import Records
from soloist.megakernel.plan import Plan
from soloist.parallel.lanes import modules_of

# The exchanges of attention and of the MLP, in the order of `modules_of`.
_NAMES = ("published_mid", "published_in")


class Published:
    """What all lanes published one rank: each value with the epoch that it is of.

    Args:
        plan: its buffers' sizes.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.records = Records(plan)
        self._modules = dict(zip(_NAMES, modules_of(plan.model), strict=True))
        self._values: dict[str, Tensor] = {}
        self._epochs: dict[str, Tensor] = {}
        for name, buffer in plan.exchanges.published.items():
            if name != "best":
                *shape, _ = buffer.shape
                shape = shape if name in self._modules else [1, *shape]
                self._values[name] = torch.full(shape, torch.nan)
                self._epochs[name] = torch.full(shape, -1)
        self._received: Counter[tuple[str, int, int]] = Counter()  # by buffer, epoch and block

    def publish(self, name: str, epoch: int, lane: int, block: int, rows: range, x: Tensor) -> None:
        """Store a block's values [queries, rows]."""
        epochs = self._epochs[name]
        where = (epoch % len(epochs), lane, slice(len(x)), slice(rows.start, rows.stop))
        before = set(epochs[where].unique().tolist()) - {-1}
        assert all(self._nobody_needs(name, old, block) for old in before), f"{name}: overwritten"
        assert epoch not in before, f"{name}: published twice"
        self._values[name][where], epochs[where] = x, epoch

    def is_there(self, name: str, epoch: int, queries: int) -> bool:
        """All lanes have published everything of an epoch."""
        epochs = self._epochs[name]
        return bool((epochs[epoch % len(epochs), :, :queries] == epoch).all())

    def receive(self, name: str, epoch: int, block: int, rows: range, queries: int) -> Tensor:
        """[lanes, queries, rows] of an epoch."""
        epochs = self._epochs[name]
        self._received[name, epoch, block] += 1
        where = (epoch % len(epochs), slice(None), slice(queries), slice(rows.start, rows.stop))
        assert (epochs[where] == epoch).all(), f"{name}: received before it is published"
        return self._values[name][where]

    def _nobody_needs(self, name: str, epoch: int, block: int) -> bool:
        times = 1
        if name in self._modules:
            module, layer = self._modules[name], (epoch - 1) % self._plan.model.num_layers
            later = layer + module.lanes.delay_layers
            received_later = later < self._plan.model.num_layers and module.receives(later)
            times = int(module.sums(layer)) + int(received_later)
        return self._received[name, epoch, block] == times * self._plan.shape.lanes_here
