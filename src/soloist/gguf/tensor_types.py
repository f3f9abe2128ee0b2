"""Types of tensors in GGUF: their numbers, names and blocks. Pure.

Source: `ggml_type` and the blocks' structures in ggml.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """One way to store numbers.

    Attributes:
        name: as ggml spells it.
        values: numbers of a block.
        num_bytes: of a block.
    """

    name: str
    values: int
    num_bytes: int


# Types that are read, by their number in a file.
TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
BY_NAME: Mapping[str, TensorType] = {known.name: known for known in TYPES.values()}

# Types that are only named in refusals.
_OTHERS: Mapping[int, str] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def name_of(number: int) -> str:
    """What people call a type, also one that is not read."""
    if number in TYPES:
        return TYPES[number].name
    return _OTHERS.get(number, f"number {number}")
