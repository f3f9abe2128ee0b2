"""Weights that no checkpoint has: random ones, to measure shapes."""

from collections.abc import Iterable

import torch

from soloist.model.dtype import Dtype
from soloist.model.tensors import TensorSpec
from soloist.model.torch_types import TORCH_DTYPES, Weights


def random_weights(
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    device: torch.device,
    seed: int = 0,
    *,
    home: torch.device | None = None,
) -> Weights:
    """Weights for benchmarks: normal values scaled so that activations keep their size.

    Args:
        specs: names and shapes.
        dtype: of the result; values are drawn in 32 bits.
        seed: of the first tensor's numbers; the others follow it.
        device: draws them; another kind of device draws other numbers.
        home: where they lie afterwards; `device` if None.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    weights: Weights = {}
    for spec in specs:
        values = torch.empty(spec.shape, dtype=torch.float32, device=device)
        if spec.name.endswith("norm"):
            values.fill_(1.0)
        else:
            values.normal_(0.0, spec.shape[-1] ** -0.5, generator=generator)
        weights[spec.name] = values.to(TORCH_DTYPES[dtype]).to(home or device)
    return weights
