"""How a token is chosen from logits: one definition, which every device must match bit for bit.

Reading order: `params` (what a request may ask for), `sample` (the definition in its steps),
`adjust` and `filters` (two of those steps), `noise` and `elementary` (arithmetic that is the same
everywhere), `stop` and `logprobs` (what surrounds a choice). docs/sampling.md has it in words.
"""

from soloist.sampling.logprobs import TokenLogprobs, logprobs
from soloist.sampling.params import SamplingParams
from soloist.sampling.sample import Sampler, sample
from soloist.sampling.stop import FinishReason, StopTest

__all__ = [
    "FinishReason",
    "Sampler",
    "SamplingParams",
    "StopTest",
    "TokenLogprobs",
    "logprobs",
    "sample",
]
