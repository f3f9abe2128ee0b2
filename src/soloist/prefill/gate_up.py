"""gate_up and SwiGLU in one kernel of ours, for many tokens on Hopper."""

import ctypes
from pathlib import Path

from torch import Tensor

from soloist.jit.source import Source
from soloist.jit.tensor_map import ALIGNMENT, Box, TensorMap, tensor_map
from soloist.prefill import hopper

KERNEL, ENTRY = "kernels/gate_up.cu", "gate_up"
# Below, a library has tiles that fill the GPU better.
FEWEST_TOKENS = 1024
# Of a cluster of two blocks: tokens, and neurons, of each a row of gate and one of up.
_CLUSTER, _ROWS, _NEURONS = 2, 256, 128
_THREADS, _SLOTS = 384, 4
# What one copy takes of tokens and of gate's or up's rows, and writes of results.
_FACTOR_BOX, _RESULT_BOX = Box(128, 64), Box(16, 64)
# In a slot a box of tokens, one of gate and one of up; and the results of a block.
SHARED_BYTES = _SLOTS * 3 * 128 * 128 + _ROWS // _CLUSTER * _NEURONS * 2


def has_gate_up(arch: str, hidden: int, ffn: int) -> bool:
    """Whether there is a kernel for this architecture, of whole steps and tiles.

    One that has fewer steps than slots gains nothing, and was seen to spill registers.
    """
    step = _FACTOR_BOX.columns
    is_whole = hidden % step == 0 and ffn % _NEURONS == 0
    return arch == hopper.ARCH and is_whole and hidden >= _SLOTS * step


def gate_up_source(spec: str) -> Source:
    """What is compiled.

    Args:
        spec: as of `header`.
    """
    counts = {
        "kGateUpThreads": _THREADS,
        "kGateUpRows": _ROWS,
        "kGateUpSlots": _SLOTS,
        "kGateUpShared": SHARED_BYTES,
    }
    own = "".join(f"constexpr unsigned {name} = {n}u;\n" for name, n in counts.items())
    return Source(KERNEL, spec + own)


class GateUp:
    """The kernel, compiled and loaded.

    Args:
        source: of `gate_up_source`; sizes as `has_gate_up` wants them.
        cache_root: where compiled kernels are kept; None keeps none on disk.

    Raises:
        DeviceError: it cannot be compiled or loaded.
    """

    def __init__(self, source: Source, cache_root: Path | None) -> None:
        self._module = hopper.load(source, ENTRY, SHARED_BYTES, cache_root)

    @staticmethod
    def suits(x: Tensor, matrix: Tensor) -> bool:
        """Whether these are many tokens, and lie where the copy engine reaches them."""
        return len(x) >= FEWEST_TOKENS and matrix.data_ptr() % ALIGNMENT == 0

    def launch(self, x: Tensor, matrix: Tensor, out: Tensor, stream: int) -> None:
        """`out` [T, F] = silu(`x` · gateᵀ) · (`x` · upᵀ), products rounded to 16 bits.

        Args:
            x: [T, H], 16-bit.
            matrix: [2 F, H], gate's rows first; both as `suits` wants them.
            out: of 16-bit values, too.
            stream: handle.
        """
        rows, neurons = out.shape
        row_tiles = -(-rows // _ROWS)
        tiles = row_tiles * (neurons // _NEURONS)
        clusters = min(tiles, self._module.num_sms // _CLUSTER)
        args = (
            _map(x, _FACTOR_BOX), _map(matrix, _FACTOR_BOX), _map(out, _RESULT_BOX),
            ctypes.c_uint32(row_tiles),
        )  # fmt: skip
        self._module.launch(
            clusters * _CLUSTER, _THREADS, SHARED_BYTES, args, stream,
            cooperative=False, cluster=_CLUSTER,
        )  # fmt: skip


def _map(matrix: Tensor, box: Box) -> TensorMap:
    return tensor_map(hopper.address(matrix), *matrix.shape, box)
