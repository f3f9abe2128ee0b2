"""How GGUF's types of blocks stand for their numbers: (code - zero) · scale, or with offsets. Pure.

What is computed in fp32 of a block's own scales has the bits of gguf-py's `dequantize`: products of
a 16-bit scale, a scale of up to 8 bits and a code have at most 24 bits, so only adding an offset
rounds.
"""

from collections.abc import Mapping

from soloist.model.dtype import Dtype
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes
from soloist.model.stored import StoredTensor


def _scheme(
    name: str, codes: Codes, group: int = 32, *, has_offsets: bool = False, super_block: int = 0
) -> Scheme:
    return Scheme(
        name, Layout.BLOCKS, codes, group, inner_scales=Dtype.FP16, has_offsets=has_offsets,
        super_block=super_block,
    )  # fmt: skip


# Columns of a block of a K-quant.
_SUPER = 256
SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _scheme("Q8_0", Codes.INT8),
        _scheme("Q4_0", Codes.INT4),
        _scheme("Q4_1", Codes.INT4, has_offsets=True),
        _scheme("Q4_K", Codes.INT4, has_offsets=True, super_block=_SUPER),
        _scheme("Q5_K", Codes.INT6, has_offsets=True, super_block=_SUPER),
        _scheme("Q6_K", Codes.INT6, 16, super_block=_SUPER),
    )
}


def method_of(tensors: Mapping[str, StoredTensor]) -> Method:
    """Each matrix is stored as its tensor's type says."""

    def of(module: str) -> tuple[Scheme | None, ...]:
        stored = tensors.get(f"{module}.weight")
        return (None if stored is None else SCHEMES.get(stored.dtype),)

    return of
