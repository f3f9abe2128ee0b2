"""Buffers through which blocks exchange results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import EXCHANGE_COPIES, MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import STEP_COLUMNS


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The nearest numbers of a dtype, in fp32; None for no rounding."""
    return x if dtype is None else x.to(dtype).float()


class Exchange:
    """One exchange buffer: values that blocks write for each other, NaN until they are written."""

    def __init__(self, plan: Plan, name: str, value_bytes: int = 4) -> None:
        self._name = name
        *shape, row_bytes = plan.exchanges.workspace[name].shape
        self.values = torch.full((*shape, row_bytes // value_bytes), torch.nan)

    def write(self, epoch: int, where: tuple[object, ...], values: Tensor) -> None:
        """Store at `where` of the epoch's copy, where nothing may be yet."""
        copy = self.values[epoch % EXCHANGE_COPIES]
        assert copy[where].isnan().all(), f"{self._name}: epoch {epoch} is written twice"  # type: ignore[index]
        assert not values.isnan().any(), f"{self._name}: NaN is written"
        copy[where] = values  # type: ignore[index]

    def read(self, epoch: int, where: tuple[object, ...]) -> Tensor:
        """What lies at `where`, all of which must have been written."""
        values = self.values[epoch % EXCHANGE_COPIES][where]  # type: ignore[index]
        assert not values.isnan().any(), f"{self._name}: epoch {epoch} is read before it is written"
        return values

    def clear(self, epoch: int) -> None:
        """What the cleaner warps of all blocks do to an epoch's copy."""
        self.values[epoch % EXCHANGE_COPIES] = torch.nan


class Operand(Exchange):
    """Activations [k / 32][query][k % 32]; columns of padding are zeros for good.

    Args:
        plan: the buffer's size.
        name: the buffer's.
        dtype: what activations are rounded to; None for no rounding.
    """

    def __init__(self, plan: Plan, name: str, dtype: torch.dtype | None = None) -> None:
        super().__init__(plan, name, 2)
        self._dtype = dtype
        activations = plan.exchanges.operands[name]
        k = torch.arange(self.values.shape[1] * 32).view(-1, 1, 32)
        self._padding = k % activations.slot_columns >= activations.columns
        self.values.masked_fill_(self._padding, 0)

    def clear(self, epoch: int) -> None:
        """The same, but for the padding."""
        super().clear(epoch)
        self.values[epoch % EXCHANGE_COPIES].masked_fill_(self._padding, 0)

    def publish(self, epoch: int, queries: Sequence[int], k: Sequence[int], values: Tensor) -> None:
        """Values [queries, k]."""
        places, query = torch.tensor(k, dtype=torch.int64), torch.tensor(queries)[:, None]
        self.write(epoch, (places // 32, query, places % 32), rounded(values, self._dtype))

    def read_for(self, op: Operation, epoch: int, queries: int) -> Tensor:
        """[k, 8] for a matrix, zeros for queries that are not in use."""
        chunks = op.matrix.steps * STEP_COLUMNS // 32
        out = self.values.new_zeros(chunks * 32, MAX_QUERIES)
        part = self.read(epoch, (slice(chunks), slice(queries)))
        out[:, :queries] = part.transpose(1, 2).flatten(0, 1)
        return out
