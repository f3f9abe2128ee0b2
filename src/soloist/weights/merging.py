"""A LoRA merged into a tensor of a model: W + scale · B · A, rounded once.

The sum is computed in fp64 from exactly what the files hold, taken to fp32, and rounded to the type
in which the model stores the tensor. So a merged tensor has the same bytes whatever the precision
of the run is, and hardly ever other ones on another device: fp64 keeps the order of its sums out of
16 bits. DoRA (arXiv 2402.09353) then gives each row of the sum the length that was trained.
"""

import torch
from torch import Tensor

from soloist.model.adapter import Adapter, Change
from soloist.model.checkpoint import open_file
from soloist.model.stored import StoredTensor
from soloist.weights.finite import require_finite
from soloist.weights.memory import MERGED_AT_ONCE


def require_numbers(adapter: Adapter) -> None:
    """Read every number of an adapter once.

    Raises:
        NotFinite: one is NaN or infinite.
    """
    for stored in adapter.tensors:
        require_finite(stored.name, _read(stored))


def merged(name: str, values: Tensor, change: Change, device: torch.device) -> Tensor:
    """A tensor of a model as an adapter changes it.

    Args:
        name: of the tensor, for messages.
        values: as the model stores it; on any device.
        change: what becomes of it.
        device: where it is computed.

    Returns:
        On `device`, in the type of `values`.

    Raises:
        NotFinite: the model's numbers are not finite, or a sum is too large for their type.
    """
    dtype = values.dtype
    if change.whole is not None:
        values = _read(change.whole)
    if change.low_rank is None:
        made = values.to(device, dtype)
        require_finite(f"{name} of the adapter in {dtype}", made)
        return made
    low_rank = change.low_rank
    up, down = (_read(stored).to(device).double() for stored in (low_rank.b, low_rank.a))
    if low_rank.is_transposed:
        up, down = down.T, up.T
    lengths = None
    if low_rank.lengths is not None:
        lengths = _read(low_rank.lengths).to(device).double()
    made = torch.empty(values.shape, dtype=dtype, device=device)
    rows = max(1, MERGED_AT_ONCE // values.shape[1])
    for start in range(0, values.shape[0], rows):
        some = slice(start, start + rows)
        total = (up[some] @ down).mul_(low_rank.scale).add_(values[some].to(device).double())
        if lengths is not None:
            total *= (lengths[some] / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
        made[some] = total.float()
    require_finite(f"{name} merged with the adapter", made)
    return made


def _read(stored: StoredTensor) -> Tensor:
    """A tensor of an adapter, on the host."""
    with open_file(stored.file, "pt") as file:
        values: Tensor = file.get_tensor(stored.name)
        return values
