"""What blocks of the head tell all ranks: logits, and the best token of each block."""

import torch
from torch import Tensor

from soloist.megakernel.limits import MAX_COLUMNS
from soloist.megakernel.plan import Plan


class Logits:
    """Those of all ranks, for kernels that sample: [columns, token ids], NaN while absent."""

    def __init__(self, plan: Plan) -> None:
        self._values = torch.full((MAX_COLUMNS, plan.exchanges.sampled_rows), torch.nan)

    def clear(self) -> None:
        """Begin a round."""
        self._values[:] = torch.nan

    def write(self, first: int, values: Tensor) -> None:
        """A block's logits [columns, ids] from a token id on."""
        place = self._values[: len(values), first : first + values.shape[1]]
        assert place.isnan().all(), "a logit is stored twice"
        place.copy_(values)

    def read(self, columns: int, ids: range) -> Tensor:
        """[columns, ids], all of which must have been written."""
        logits = self._values[:columns, ids.start : ids.stop].clone()
        assert not logits.isnan().any(), "a logit is nobody's"
        return logits


class Records:
    """[2, columns, blocks of all, 4]: value, token, what the host wants, round."""

    def __init__(self, plan: Plan) -> None:
        exchanges = plan.exchanges
        best = (exchanges.told if plan.model.lanes else exchanges.workspace)["best"]
        self._values = torch.zeros(*best.shape[:-1], 4, dtype=torch.float64)

    def write(self, done: int, column: int, place: int, best: tuple[float, int]) -> None:
        """A block's best logit and its token, after so many rounds that are done."""
        record = torch.tensor([*best, 0, done + 1], dtype=torch.float64)
        self._values[done % 2, column, place] = record

    def are_there(self, done: int, columns: int) -> bool:
        """Those of all blocks."""
        return bool((self._values[done % 2, :columns, :, 3] == done + 1).all())

    def choose(self, done: int, columns: int) -> list[int]:
        """Each column's best token, the first of equals."""
        assert self.are_there(done, columns), "a record of another round"
        records = self._values[done % 2, :columns]
        return [min((-float(v), int(i)) for v, i, *_ in column)[1] for column in records]
