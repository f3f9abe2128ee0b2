"""Divisors of rope's frequencies, which files hold as a tensor: Llama 3's rule in llama.cpp."""

import math
import struct
from dataclasses import replace

from soloist.errors import BadGguf, UnsupportedGguf
from soloist.gguf.splits import Gguf
from soloist.model.config import ModelConfig
from soloist.model.gguf.configuration import ARCHITECTURES, architecture_of
from soloist.model.gguf.naming import ROPE_FREQS
from soloist.model.rope import DividedScaling, Rope


def with_rope_freqs(gguf: Gguf, config: ModelConfig) -> ModelConfig:
    """The model with its frequencies divided, where the file has divisors.

    Raises:
        BadGguf: they are not positive numbers, one for each pair of a head's dimensions.
        UnsupportedGguf: there is another rule beside them.
    """
    info = gguf.tensors.get(ROPE_FREQS)
    if info is None or not ARCHITECTURES[architecture_of(gguf)].divides:
        return config
    file, count = str(gguf.file), config.layers[0].attention.head_dim // 2
    if config.rope.scaling is not None:
        raise UnsupportedGguf(
            file, f"the rule of rope beside '{ROPE_FREQS}'", "a factor",
            "one of the two",
        )  # fmt: skip
    if info.type.name != "F32" or info.shape != (count,):
        raise BadGguf(
            file, f"'{ROPE_FREQS}' is {info.type.name} of shape {list(info.shape)}, "
            f"not F32 of shape [{count}]",
        )  # fmt: skip
    with gguf.files[ROPE_FREQS].open("rb") as opened:
        opened.seek(info.start)
        divisors = struct.unpack(f"<{count}f", opened.read(info.num_bytes))
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise BadGguf(file, f"'{ROPE_FREQS}' holds {min(divisors):g} (allowed: positive numbers)")
    return replace(config, rope=Rope(config.rope.theta, DividedScaling(divisors)))
