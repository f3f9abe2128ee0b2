"""How a token is chosen from logits: one definition, which every device must match bit for bit.

Reading order: `params` (what a request may ask for), `sample` (the definition in its steps),
`adjust` and `filters` (two of those steps), `noise` and `elementary` (arithmetic that is the same
everywhere), `stop` and `logprobs` (what surrounds a choice). docs/sampling.md has it in words.

Names are resolved on first use: processes that only read requests never load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.sampling.logprobs import TokenLogprobs
    from soloist.sampling.params import SamplingParams
    from soloist.sampling.sample import Sampler
    from soloist.sampling.stop import FinishReason, StopTest

__all__ = ["FinishReason", "Sampler", "SamplingParams", "StopTest", "TokenLogprobs"]

_HOMES = {
    "FinishReason": "stop",
    "Sampler": "sample",
    "SamplingParams": "params",
    "StopTest": "stop",
    "TokenLogprobs": "logprobs",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module attribute may be
    if name not in _HOMES:
        raise AttributeError(f"module 'soloist.sampling' has no attribute {name!r}")
    return getattr(import_module(f"soloist.sampling.{_HOMES[name]}"), name)
