"""Log probabilities of a choice, from the raw logits; nothing here decides a token."""

from dataclasses import dataclass

import numpy as np
import torch

from soloist.sampling.filters import ranked


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position.

    Attributes:
        chosen: of the token that was taken.
        top: the likeliest tokens as (token id, log probability), likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: torch.Tensor, token_id: int, top: int = 0) -> TokenLogprobs:
    """Log-softmax of raw logits [V], before penalties and temperature, computed in float64."""
    raw = logits.detach().to("cpu", torch.float32).numpy()
    gaps = raw.astype(np.float64) - raw.max()
    values = gaps - np.log(np.exp(gaps).sum())
    best = ranked(raw, min(top, len(raw))) if top > 0 else ()
    return TokenLogprobs(
        chosen=float(values[token_id]),
        top=tuple((int(i), float(values[i])) for i in best),
    )
