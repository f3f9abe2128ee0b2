"""From a quantised matrix's tensors on disk to codes, scales and zeros in rows. Torch, any device.

One file for each order on disk; `soloist.model.quantization` says which tensors there are, and
`soloist.weights.numbers` what comes of the result.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from soloist.errors import NotFinite
from soloist.model.quantization.matrices import StoredMatrix
from soloist.model.quantization.scheme import Layout, Role
from soloist.model.quantized import Codes
from soloist.weights.decoding import by_blocks, by_bytes, by_columns, by_words
from soloist.weights.decoding.parts import Decoded

_DECODERS: Mapping[Layout, Callable[[StoredMatrix, Mapping[Role, Tensor]], Decoded]] = {
    Layout.BYTES: by_bytes.decode,
    Layout.WORDS: by_words.decode,
    Layout.AWQ: by_columns.decode_awq,
    Layout.GPTQ: by_columns.decode_gptq,
    Layout.BLOCKS: by_blocks.decode,
}


def decode(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> Decoded:
    """The parts of a matrix, on the device of its tensors.

    Raises:
        NotFinite: scales, or codes of floats, hold NaN or infinite values.
        CheckpointError: the tensors' values contradict the configuration.
    """
    _require_finite(matrix, tensors)
    return _DECODERS[matrix.scheme.layout](matrix, tensors)


def _require_finite(matrix: StoredMatrix, tensors: Mapping[Role, Tensor]) -> None:
    if Role.SCALES not in tensors:
        return  # they lie among codes
    scales = tensors[Role.SCALES].to(torch.float32)
    bad = {Role.SCALES: ~torch.isfinite(scales)}
    if matrix.scheme.codes is Codes.FP8:
        # This format has no infinities, and NaN with either sign: the largest magnitude.
        magnitudes = tensors[Role.CODES].view(torch.uint8) & 0x7F
        if int(magnitudes.amax()) == 0x7F:
            bad[Role.CODES] = magnitudes == 0x7F
    for role, found in bad.items():
        if count := int(found.sum()):
            raise NotFinite(matrix.tensors[role].shown, count, found.numel())
