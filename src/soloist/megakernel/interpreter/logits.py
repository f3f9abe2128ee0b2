"""What blocks of the head publish to all ranks: logits, and the best token of each block."""

import torch
from torch import Tensor

from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan


class Logits:
    """Those of all ranks, for kernels that sample: [queries, token ids], NaN until written."""

    def __init__(self, plan: Plan) -> None:
        self._values = torch.full((MAX_QUERIES, plan.exchanges.sampled_rows), torch.nan)

    def clear(self) -> None:
        """Begin a round."""
        self._values[:] = torch.nan

    def write(self, first: int, values: Tensor) -> None:
        """A block's logits [queries, ids] from a token id on."""
        place = self._values[: len(values), first : first + values.shape[1]]
        assert place.isnan().all(), "a logit is stored twice"
        place.copy_(values)

    def read(self, queries: int, ids: range) -> Tensor:
        """[queries, ids], all of which must have been written."""
        logits = self._values[:queries, ids.start : ids.stop].clone()
        assert not logits.isnan().any(), "a logit is nobody's"
        return logits


class Records:
    """[2, queries, blocks of all, 4]: value, token, what the host wants, round."""

    def __init__(self, plan: Plan) -> None:
        self._values = torch.zeros(*plan.exchanges.best.shape[:-1], 4, dtype=torch.float64)

    def write(self, done: int, query: int, place: int, best: tuple[float, int]) -> None:
        """A block's best logit and its token, after so many rounds that are done."""
        record = torch.tensor([*best, 0, done + 1], dtype=torch.float64)
        self._values[done % 2, query, place] = record

    def are_there(self, done: int, queries: int) -> bool:
        """Those of all blocks."""
        return bool((self._values[done % 2, :queries, :, 3] == done + 1).all())

    def choose(self, done: int, queries: int) -> list[int]:
        """Each query's best token, the first of equals."""
        assert self.are_there(done, queries), "a record of another round"
        records = self._values[done % 2, :queries]
        return [min((-float(v), int(i)) for v, i, *_ in query)[1] for query in records]
