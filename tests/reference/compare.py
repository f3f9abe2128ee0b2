"""One metric and one table of bounds for the reference tests."""

from typing import Literal

import torch
from torch import Tensor

# Largest absolute difference of fp32 logits that passes, by what is compared.
BOUNDS = {
    "transformers": 1e-4,
    "literal lanes": 1e-4,
    "cache capacity": 1e-6,
    "interleaved sequences": 0.0,
    "repetition": 0.0,
    "chunks": 1e-5,
}
Pair = Literal[
    "transformers",
    "literal lanes",
    "cache capacity",
    "interleaved sequences",
    "repetition",
    "chunks",
]


def assert_close(seen: Tensor, wanted: Tensor, pair: Pair, what: str) -> None:
    """Logits [T, V] agree within the bound; a failure names the first coordinate that does not."""
    assert seen.shape == wanted.shape, f"{what}: shape {seen.shape}, wanted {wanted.shape}"
    bound = BOUNDS[pair]
    # A NaN on either side is no agreement.
    bad = ~((seen.double() - wanted.double()).abs() <= bound)
    if bad.any():
        token, word = (int(i) for i in bad.nonzero()[0])
        message = (
            f"{what}: {int(bad.sum())} of {bad.numel()} logits differ; the first is token {token}, "
            f"word {word}: {seen[token, word]:.8g}, wanted {wanted[token, word]:.8g} "
            f"(bound {bound:g} against {pair})"
        )
        raise AssertionError(message)


def divergence(logits: Tensor, exact: Tensor) -> float:
    """Kullback-Leibler divergence of the next-token distributions, averaged over positions."""
    p = torch.log_softmax(exact.double(), -1)
    q = torch.log_softmax(logits.double(), -1)
    return float((p.exp() * (p - q)).sum(-1).mean())
