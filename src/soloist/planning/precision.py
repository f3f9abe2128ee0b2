"""How weights could be stored, and what that makes of a model's size.

Quantised are the matrices of the layers, as published checkpoints do it; embedding, head, norms and
biases stay 16-bit, and so does the KV cache.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from soloist.errors import SettingError
from soloist.model.quantized import GROUPS
from soloist.model.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Precision:
    """One way to store weights.

    Attributes:
        name: for people and for `--precision`.
        bits: of a weight in a layer's matrix, without its share of a scale.
        scale_bits: of one scale; of fp8 the share of it that a weight has.
        groups: weights along a row that may share a scale, the usual number first; the first that
            divides a row is taken, and one has to.
        runs: Soloist's decode kernel can run it.
        measured: its costs were measured.
    """

    name: str
    bits: float
    scale_bits: float = 0
    groups: tuple[int, ...] = (1,)
    runs: bool = False
    measured: bool = False

    def bits_in(self, columns: int) -> float:
        """Of a weight with its share of a scale, in rows of so many weights."""
        divisors = (group for group in self.groups if columns % group == 0)
        return self.bits + self.scale_bits / next(divisors, self.groups[-1])


SIXTEEN_BIT = Precision("fp16/bf16", 16, runs=True, measured=True)
PRECISIONS = (
    SIXTEEN_BIT,
    Precision("fp8", 8, 32 / (128 * 128), runs=True),  # one fp32 scale for each block of 128 × 128
    Precision("int4", 4, 16, GROUPS, runs=True),  # one 16-bit scale for 128 weights, or fewer
    Precision("fp4", 4, 8, (32,)),  # MXFP4: one 8-bit exponent for 32 weights
)


def find_precision(given: str) -> Precision:
    """The precision of this name; bf16 and fp16 are one, since they weigh the same.

    Raises:
        SettingError: there is none.
    """
    for precision in PRECISIONS:
        if given == precision.name or given in precision.name.split("/"):
            return precision
    raise SettingError("--precision", given, "fp16, bf16, fp8, int4, fp4")


def stored_bytes(values: int, bits: float) -> int:
    """Bytes of `values` numbers of `bits` bits each."""
    return math.ceil(values * bits / 8)


def weights_bytes(specs: Iterable[TensorSpec], precision: Precision) -> int:
    """Bytes of all these tensors."""
    return sum(
        stored_bytes(
            spec.num_values,
            precision.bits_in(spec.shape[-1]) if is_quantised(spec) else SIXTEEN_BIT.bits,
        )
        for spec in specs
    )


def can_store(specs: Iterable[TensorSpec], precision: Precision) -> bool:
    """Every row of the layers' matrices divides into groups."""
    return all(
        any(spec.shape[-1] % group == 0 for group in precision.groups)
        for spec in specs
        if is_quantised(spec)
    )


def is_quantised(spec: TensorSpec) -> bool:
    """A matrix of a layer, which precisions below 16 bits shrink."""
    return spec.is_layer_matrix
