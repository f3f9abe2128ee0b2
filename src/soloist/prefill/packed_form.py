"""What a product with a packed matrix is compiled for: the text of its header. Pure.

The kernel is `cuda/kernels/packed_product.cu`.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import gcd

from soloist.jit.source import Source
from soloist.megakernel.abi import Field, Struct
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan
from soloist.megakernel.tile import HALF_TILE_ROWS, HALF_TILE_VALUES, STEP_COLUMNS
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes
from soloist.prefill.fragments import (
    CHUNK_COLUMNS,
    GROUP_FRAGMENTS,
    STEP_CHUNKS,
    chunk_bytes,
    num_chunks,
)
from soloist.prefill.header import AWAIT_NS

KERNEL, ENTRY = "kernels/packed_product.cu", "packed_product"
ROWS_KERNEL, ROWS_ENTRIES = "kernels/packed_rows.cu", ("arrange", "add_parts", "look_up")
QUANTIZE_KERNEL, QUANTIZE_ENTRY = "kernels/quantize_rows.cu", "quantize_rows"
ARCH = "sm_90a"
# Tokens that a tile may have, ascending.
WIDTHS = (8, 64, 128, 192, 256)
# Into how many parts the columns of a matrix may be cut for few tokens, how many these are, and in
# a tile, whose results are fp32 and leave little room for weights.
PARTS, MOST_PARTED_TOKENS, MOST_PARTED_WIDTH = (1, 2, 4, 8), 128, 64
# Of tokens in a tile that is sliced, and slots of spans of them: as many for each slice.
SLICED_WIDTH, SLICED_TOKEN_SLOTS = 64, 4
# Slots of tokens that a block may have, where it has as many as that.
TOKEN_SLOTS = (3, 4)
# Tiles of so many wait for weights, and have room for more slots; wider ones for their products.
_FEW_TOKENS = 128
# A slot of results has so many tokens: places of 8 rows of 16 bits, or as fp32 of 16 rows, which
# are so much longer than their values that lanes meet in no bank.
_BATCH, _WIDE_ROW_BYTES, _ROW_BYTES, _MORE_WIDE_BYTES, _MORE_BYTES = 32, 80, 16, 64, 16
# Slots of results as fp32, which are large.
_MOST_WIDE_SLOTS = 2
_MOST_WEIGHT_SLOTS, _LEAST_SLOTS, _LEAST_SLICED_SLOTS = 32, 3, 4
_BARRIER_BYTES = 1024  # of all slots, 16 each
_LANES, _GROUP_WARPS = 32, 4
# Tokens are copied so many bytes at a time: a chunk of columns, or two in 8 bits.
SPAN_BYTES = 2 * CHUNK_COLUMNS
# Columns of a span in 8 bits, of which matrices multiplied in 8 bits have whole ones.
EIGHT_BIT_COLUMNS = SPAN_BYTES
# Of the warps that do not multiply, those that have weights copied; one does tokens, one results.
_WEIGHT_WARPS = _GROUP_WARPS - 2
# Of threads that do not multiply and of others, once groups of warps have traded those that the
# launch gives all of them: of tiles of a few tokens, whose sums are few, and of wider ones.
_FEW_REGISTERS, _REGISTERS = (56, 224), (40, 232)
_CODES = {
    None: "kPlain", Codes.INT4: "kInt4", Codes.INT6: "kInt6", Codes.INT8: "kInt8",
    Codes.FP8: "kFp8",
}  # fmt: skip
_SCALES = {Dtype.BF16: "kBf16", Dtype.FP16: "kFp16", Dtype.FP32: "kFp32"}


# Of rows that are grouped by expert.
PIECE = Struct(
    "Piece",
    "Rows of activations that one expert has, neighbours of each other.",
    (
        Field("expert", "u32"),
        Field("first", "u32"),
        Field("stop", "u32", "behind the last row"),
        Field("unused", "u32", "16 bytes are read at once"),
    ),
)


class Out(StrEnum):
    """What becomes of sums; values are CUDA's names."""

    VALUES = "kValues"  # 16 bits
    WIDE = "kWide"  # fp32
    GATED = "kGated"  # SwiGLU of gate and up
    ARRANGED = "kArranged"  # the same, in the order in which the next product reads it


def is_gated(out: Out) -> bool:
    """Whether results are neurons."""
    return out in (Out.GATED, Out.ARRANGED)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to multiply.

    Attributes:
        stored: how the matrix is stored.
        dtype: of activations, and of what quantised weights become.
        steps: of the matrix.
        columns: of the matrix.
        pairs_steps: as of the matrix.
        tokens: of a tile, one of `WIDTHS`.
        out: what becomes of sums.
        groups: of four warps that multiply 64 rows each.
        token_slots: of spans of tokens that lie in shared memory.
        most_weight_slots: of weights, where the rest of shared memory has room for them.
        most_weight_chunks: of weights in a slot, which come in copies of as many; a power of two.
        most_result_slots: of results on their way to memory, some tokens of a tile each.
        sliced: groups have the same rows and a slice of the columns each, whose sums are added
            ("sliced-K"): for tiles of rows for one group.
        parts: of the columns, each a tile's of its own; more than one gives fp32 that is to be
            added (`PackedRows.add_parts`).
        ends_in_half: as of the matrix.
        grouped: rows are those of several experts, each with a matrix of its own.
        eight_bits: tokens are in FP8 (`PackedQuantize`), as the matrix is (`takes_eight_bits`).
    """

    stored: WeightFormat
    dtype: Dtype
    steps: int
    columns: int
    pairs_steps: bool
    tokens: int
    out: Out
    groups: int = 2
    token_slots: int = 4
    most_weight_slots: int = _MOST_WEIGHT_SLOTS
    most_weight_chunks: int = 8
    most_result_slots: int = 8
    sliced: bool = False
    parts: int = 1
    ends_in_half: bool = False
    grouped: bool = False
    eight_bits: bool = False

    @property
    def fragments(self) -> int:
        """Of a block, at most."""
        return self.groups // self.slices * GROUP_FRAGMENTS

    @property
    def slices(self) -> int:
        """Of the columns of a tile."""
        return self.groups if self.sliced else 1

    @property
    def own_chunks(self) -> int:
        """Of a slice of a part."""
        return num_chunks(self.columns) // (self.parts * self.slices)

    @property
    def _sliced_bytes(self) -> int:
        """Of the sums of all slices but the first."""
        return (
            (self.slices - 1)
            * GROUP_FRAGMENTS
            * 2
            * HALF_TILE_ROWS
            * self.tokens
            * Dtype.FP32.num_bytes
        )

    @property
    def threads(self) -> int:
        """Of a block: one group of warps more than multiply."""
        return (self.groups + 1) * _GROUP_WARPS * _LANES

    @property
    def span_chunks(self) -> int:
        """Of tokens in a slot. A few tokens' products are done before a group is ready for more."""
        is_even = self.own_chunks % 2 == 0
        return 2 if self.eight_bits or (self.tokens <= _FEW_TOKENS and is_even) else 1

    @property
    def token_slot_bytes(self) -> int:
        """A span of tokens."""
        boxes = 1 if self.eight_bits else self.span_chunks
        return self.tokens * SPAN_BYTES * boxes

    @property
    def weight_chunks(self) -> int:
        """Of a slot of weights: as many as end with a step and a part, and leave room for slots."""
        step = STEP_CHUNKS // 2 if self.ends_in_half else STEP_CHUNKS
        count = gcd(step, self.own_chunks, self.most_weight_chunks)
        least = _LEAST_SLICED_SLOTS if self.sliced else _LEAST_SLOTS
        most = self._weight_room // (least * self._weight_chunk_bytes)
        while count > max(most, self.span_chunks):
            count //= 2
        return count

    @property
    def _weight_chunk_bytes(self) -> int:
        return self.fragments * 2 * chunk_bytes(self.stored.value_bits)

    @property
    def weight_slot_bytes(self) -> int:
        """Its chunks of weights, of all fragments."""
        return self.weight_chunks * self._weight_chunk_bytes

    @property
    def _token_place_bytes(self) -> int:
        """Of a token's results in a place."""
        return _WIDE_ROW_BYTES if self.out is Out.WIDE else _ROW_BYTES

    @property
    def _place_bytes(self) -> int:
        more = _MORE_WIDE_BYTES if self.out is Out.WIDE else _MORE_BYTES
        return _BATCH * self._token_place_bytes + more

    @property
    def result_slot_bytes(self) -> int:
        """Results of some tokens of a tile."""
        return self.fragments * (1 if self.out is Out.WIDE else 2) * self._place_bytes

    @property
    def result_slots(self) -> int:
        """As many as a tile fills."""
        most = _MOST_WIDE_SLOTS if self.out is Out.WIDE else self.most_result_slots
        return min(most, -(-self.tokens // _BATCH))

    @property
    def weight_slots(self) -> int:
        """As many as tokens and results leave room for, of each slice equally many."""
        count = min(self.most_weight_slots, self._weight_room // self.weight_slot_bytes)
        return count - count % self.slices

    @property
    def _weight_room(self) -> int:
        tokens = self.token_slots * self.token_slot_bytes
        results = self.result_slots * self.result_slot_bytes
        beside = _BARRIER_BYTES + self._sliced_bytes + results + tokens
        return TYPICAL[ARCH].shared_bytes - beside

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        tokens = self.token_slots * self.token_slot_bytes
        results = self.result_slots * self.result_slot_bytes
        return tokens + self.weight_slots * self.weight_slot_bytes + results + self._sliced_bytes

    @property
    def source(self) -> Source:
        """What is compiled."""
        return Source(KERNEL, self._header)

    @property
    def _header(self) -> str:
        own = _FEW_REGISTERS if self.tokens <= _FEW_TOKENS else _REGISTERS
        numbers = {
            "kTokens": self.tokens,
            "kGroups": self.groups,
            "kChunks": num_chunks(self.columns),
            "kSlices": self.slices,
            "kParts": self.parts,
            "kPackedThreads": self.threads,
            "kTokenSlots": self.token_slots,
            "kWeightSlots": self.weight_slots,
            "kWeightChunks": self.weight_chunks,
            "kSpanChunks": self.span_chunks,
            "kWeightWarps": _WEIGHT_WARPS,
            "kResultSlots": self.result_slots,
            "kResultBytes": self.result_slot_bytes,
            "kPlaceBytes": self._place_bytes,
            "kTokenPlaceBytes": self._token_place_bytes,
            "kPackedShared": self.shared_bytes,
            "kLoadRegisters": own[0],
            "kMultiplyRegisters": own[1],
        }
        lines = [
            weights_header(
                self.stored,
                self.dtype,
                self.steps,
                pairs_steps=self.pairs_steps,
                ends_in_half=self.ends_in_half,
            ),
            f"enum class Out : u32 {{ {', '.join(Out)} }};",
            f"constexpr Out kOut = Out::{self.out};",
            f"constexpr bool kGrouped = {str(self.grouped).lower()};",
            f"constexpr bool kEightBits = {str(self.eight_bits).lower()};",
            f"constexpr bool kTradesRegisters = {str(self.groups > 1).lower()};",
            *(f"constexpr unsigned {name} = {n}u;" for name, n in numbers.items()),
            f"constexpr unsigned long long kAwaitNs = {AWAIT_NS}ull;",
            PIECE.cuda,
            multiply_rows(self.tokens, self.dtype, eight_bits=self.eight_bits),
        ]
        return "\n".join(lines) + "\n"


def form_of(matrix: Matrix, dtype: Dtype, tokens: int, out: Out) -> Form:
    """How a matrix is multiplied by tiles of so many tokens."""
    return Form(
        matrix.format, dtype, matrix.steps, matrix.columns, matrix.pairs_steps, tokens, out,
        token_slots=TOKEN_SLOTS[0],
        ends_in_half=matrix.ends_in_half,
    )  # fmt: skip


def can_slice(form: Form) -> bool:
    """Whether each group may have a slice of the columns, of an even number of chunks."""
    return num_chunks(form.columns) % (2 * form.parts * form.groups) == 0 and not form.grouped


def takes_eight_bits(matrix: Matrix) -> bool:
    """Whether a matrix can be multiplied by activations in FP8: it is, with a scale per row."""
    meaning = matrix.format.meaning
    if meaning is None or meaning.codes is not Codes.FP8:
        return False
    return meaning.group == 0 and matrix.columns % EIGHT_BIT_COLUMNS == 0


def operations_of(plan: Plan) -> list[Operation]:
    """Every multiply of a plan, of layers of each kind and the head."""
    return [*(op for kind in plan.image.kinds for op in kind.operations.values()), plan.image.head]


def arranged_bytes(plan: Plan, most_tokens: int) -> int:
    """What a pass's activations take in the order in which packed matrices meet them."""
    widest = max(op.matrix.columns for op in operations_of(plan))
    return most_tokens * widest * plan.dtype.num_bytes


def gates_all(plan: Plan) -> bool:
    """Whether gate and up of no layer are ever written: a product has SwiGLU with it."""
    return all(
        "gate_up_bias" not in kind.vectors
        and kind.operations["gate_up"].matrix.order is RowOrder.PAIRED
        for kind in plan.image.kinds
    )


def parts_of(columns: int) -> list[int]:
    """Into how many equal parts columns can be cut, of an even number of chunks each."""
    chunks = num_chunks(columns)
    return [parts for parts in PARTS if parts == 1 or chunks % (2 * parts) == 0]


def parted_bytes(plan: Plan) -> int:
    """What products in parts take, in fp32: neither of gate_up nor of the head, with many rows."""
    layers = [op for kind in plan.image.kinds for op in kind.operations.values()]
    rows = max(op.matrix.rows for op in layers if op.matrix.order is not RowOrder.PAIRED)
    return PARTS[-1] * MOST_PARTED_TOKENS * rows * Dtype.FP32.num_bytes


def rows_source(stored: WeightFormat, dtype: Dtype, steps: int) -> Source:
    """Of the kernels that arrange activations and look up rows of an embedding stored like this."""
    return Source(ROWS_KERNEL, weights_header(stored, dtype, steps, pairs_steps=False) + "\n")


def quantize_source(dtype: Dtype) -> Source:
    """Of the kernel that gives activations of this type 8 bits."""
    lines = [
        "// Generated; see prefill/packed_form.py.",
        "#pragma once",
        f"constexpr bool kBf16 = {str(dtype is Dtype.BF16).lower()};",
    ]
    return Source(QUANTIZE_KERNEL, "\n".join(lines) + "\n")


def weights_header(
    stored: WeightFormat, dtype: Dtype, steps: int, *, pairs_steps: bool, ends_in_half: bool = False
) -> str:
    """What `cuda/tile/fragments.cuh` wants to know of a matrix."""
    meaning = stored.meaning
    codes = None if meaning is None else meaning.codes
    scale = Dtype.FP32 if meaning is None or codes is Codes.FP8 else meaning.scale_dtype
    bools = {
        "kBf16": dtype is Dtype.BF16,
        "kPairsSteps": pairs_steps,
        "kEndsInHalf": ends_in_half,
        "kHasZeros": stored.zero_bits > 0,
        "kHasOffsets": stored.offset_bits > 0,
    }
    numbers = {
        "kStepColumns": STEP_COLUMNS,
        "kHalfTileRows": HALF_TILE_ROWS,
        "kHalfTileValues": HALF_TILE_VALUES,
        "kValueBits": stored.value_bits,
        "kSteps": steps,
        "kGroup": stored.group or STEP_COLUMNS,
        "kScaleRows": stored.scale_rows,
        "kSuperColumns": stored.super_block,
    }
    return "\n".join(
        [
            "// Generated; see prefill/packed_form.py.",
            "#pragma once",
            '#include "ptx/types.cuh"',
            f"enum class Codes : u32 {{ {', '.join(_CODES.values())} }};",
            f"constexpr Codes kCodes = Codes::{_CODES[codes]};",
            f"enum class ScaleType : u32 {{ {', '.join(_SCALES.values())} }};",
            f"constexpr ScaleType kScaleType = ScaleType::{_SCALES[scale]};",
            *(f"constexpr bool {name} = {str(x).lower()};" for name, x in bools.items()),
            *(f"constexpr unsigned {name} = {n}u;" for name, n in numbers.items()),
        ]
    )


def multiply_rows(tokens: int, dtype: Dtype, *, eight_bits: bool = False) -> str:
    """CUDA text: wgmma of 64 rows in registers and so many tokens in shared memory.

    Rows `a` are of m64k16, in 8 bits of m64k32, tokens an operand of ptx/wgmma.cuh;
    s[4 j + 2 h + i] of lane l in warp w is row 16 w + 8 h + l / 4, token 8 j + 2 (l % 4) + i.
    """
    sums, kind, depth = tokens // 2, dtype.value.replace("fp16", "f16"), 16
    ending = "p, 1, 1, 0"  # signs, and that tokens lie along their columns
    if eight_bits:
        kind, depth, ending = "e4m3", 32, "p, 1, 1"
    places = ", ".join(f"%{i}" for i in range(sums))
    a = ", ".join(f"%{sums + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(s[{i}])' for i in range(sums))
    return (
        f"__device__ __forceinline__ void multiply_rows(float (&s)[{sums}], const uint4& a, u64 b, "
        "u32 adds) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{sums + 5}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{tokens}k{depth}.f32.{kind}.{kind} "
        f'{{{places}}}, {{{a}}}, %{sums + 4}, {ending}; }}"\n'
        f"      : {outputs}\n"
        '      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(adds));\n'
        "}\n"
        "// Its registers are written before the fence that products begin with.\n"
        "__device__ __forceinline__ void finish_operand(uint4& a) {\n"
        '  asm volatile("" : "+r"(a.x), "+r"(a.y), "+r"(a.z), "+r"(a.w)::"memory");\n'
        "}"
    )
