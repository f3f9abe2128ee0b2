"""What the kernel's sampler and the host share: constants, and how parameters are packed.

CUDA text is generated from soloist.sampling.constants and from what stands below, so that nothing
is typed twice; abi.py has the structures. Pure: no torch, no device.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soloist.megakernel.abi import SAMPLE_PARAMS, SAMPLE_STEP
from soloist.megakernel.layout import ALIGNMENT
from soloist.megakernel.limits import MAX_QUERIES
from soloist.sampling import constants
from soloist.sampling.filters import fraction_steps
from soloist.sampling.params import SamplingParams

# Bits of SampleParams.flags.
FLAGS = {"GREEDY": 1, "PENALTIES": 2, "MASKED": 4}

# Words that stand for a token where the best score is not finite, with that score. No id is one.
NO_TOKEN = {
    "NAN": (0xFFFFFFFF, math.nan),
    "INFINITE": (0xFFFFFFFE, math.inf),
    "NEGATIVE_INFINITE": (0xFFFFFFFD, -math.inf),
}

# SampleArgs.seen, one word a token: how often it is in the output, and whether it is in the prompt.
SEEN_IN_PROMPT = 1 << 31


# What the host stores for a query, instead of the number of rounds whose masks are there, to
# have the launch end with the round that waits.
MASK_END = 0xFFFFFFFF

# Shared memory that choosing tokens takes, at most.
SAMPLE_SHARED_BYTES = 14 * 1024


@dataclass(frozen=True, slots=True)
class ListSpan:
    """Part of the lists of token ids that all queries share."""

    begin: int = 0
    count: int = 0


def sampling_constants() -> str:
    """CUDA text of every constant of soloist.sampling.constants, as `sampling::kCamelCase`."""
    values = {name: value for name, value in vars(constants).items() if name.isupper()}
    lines = [_constant(name, value) for name, value in values.items()]
    return "\n".join(["namespace sampling {", *lines, "}  // namespace sampling", ""])


def sampling_words() -> str:
    """CUDA text of the bits and words that SampleParams and the sampler's buffers hold."""
    flags = [_constant(f"SAMPLE_{name}", bit) for name, bit in FLAGS.items()]
    words = [_constant(f"NO_TOKEN_{name}", word) for name, (word, _) in NO_TOKEN.items()]
    return "\n".join(
        [
            *flags,
            *words,
            _constant("SEEN_IN_PROMPT", SEEN_IN_PROMPT),
            _constant("MASK_END", MASK_END),
            _constant("SAMPLE_SHARED_BYTES", SAMPLE_SHARED_BYTES),
            "",
        ]
    )


def sample_workspace_bytes(blocks: int) -> int:
    """Size of the CUDA struct SampleWorkspace, which asserts that it is this."""
    histograms, records = 5 * (1024 + 32) * 16, 2 * blocks * 16
    scratch, arrivals = MAX_QUERIES * (histograms + records), 4
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in (scratch, arrivals))


def packed_params(
    params: SamplingParams,
    vocab_size: int,
    ban: ListSpan,
    bias: ListSpan,
    history: int,
    *,
    is_masked: bool = False,
) -> NDArray[np.void]:
    """SampleParams of one query, as a record of `SAMPLE_PARAMS`.

    Args:
        params: with a seed, unless greedy.
        vocab_size: V.
        ban: the ids that end generation, each once.
        bias: the ids of logit_bias and, at the same places, their values.
        history: row of `seen`.
        is_masked: the host says before every choice what it may take.
    """
    seed = params.seed or 0
    top_k = params.top_k if params.top_k is not None and params.top_k < vocab_size else 0
    flags = FLAGS["GREEDY"] * params.is_greedy | FLAGS["PENALTIES"] * params.has_penalties
    flags |= FLAGS["MASKED"] * is_masked
    return SAMPLE_PARAMS.record(
        temperature=params.temperature,
        flags=flags,
        top_k=top_k,
        top_p_steps=fraction_steps(params.top_p) if params.top_p < 1 else 0,
        min_p_steps=fraction_steps(params.min_p) if params.min_p > 0 else 0,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        seed_low=seed & constants.WORD_MASK,
        seed_high=seed >> 32,
        min_tokens=params.min_tokens,
        ban_begin=ban.begin,
        ban_count=ban.count,
        bias_begin=bias.begin,
        bias_count=bias.count,
        history=history,
    )


def bad_score(word: int) -> float:
    """The best score, NaN or infinite, of a query for which the kernel emitted `word`."""
    return dict(NO_TOKEN.values())[word]


def packed_steps(
    positions: Sequence[int] | NDArray[np.int64], num_outputs: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.void]:
    """SampleStep of each query, as records of `SAMPLE_STEP`; positions of the tokens to choose."""
    steps, wide = np.zeros(len(positions), SAMPLE_STEP.dtype), np.array(positions, np.uint64)
    steps["position_low"] = wide & np.uint64(constants.WORD_MASK)
    steps["position_high"] = wide >> np.uint64(32)
    steps["num_output"] = num_outputs
    return steps


def _constant(name: str, value: object) -> str:
    camel = "k" + "".join(word.capitalize() for word in name.split("_"))
    if isinstance(value, tuple):
        # Device code may only name an array that is itself on the device.
        items = ", ".join(_literal(item) for item in value)
        return f"__device__ constexpr {_ctype(value[0])} {camel}[{len(value)}] = {{{items}}};"
    return f"constexpr {_ctype(value)} {camel} = {_literal(value)};"


def _ctype(value: object) -> str:
    return "float" if isinstance(value, float) else "unsigned int"


def _literal(value: object) -> str:
    if isinstance(value, float):
        assert struct.unpack("f", struct.pack("f", value))[0] == value, f"{value} is not fp32"
        return f"{value.hex()}f"
    assert isinstance(value, int), f"{value!r} is neither float nor int"
    assert 0 <= value < 1 << 32, f"{value} is no 32-bit word"
    return f"{value:#x}u"
