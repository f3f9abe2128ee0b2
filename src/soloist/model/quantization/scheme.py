"""How a matrix may be stored: a scheme says which tensors stand for it, of which shapes and types.

A matrix [N, K] of the model, the tensor '….q_proj.weight' where it is not quantised, belongs to the
module '….q_proj'; the tensors that stand for it are named after the module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from soloist.errors import GroupMismatch, QuantizationMismatch
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes

# The last part of the name of the LM head's module.
_HEAD = "lm_head"
# The same of what decides over experts.
_ROUTERS = ("gate", "shared_expert_gate")


class Layout(StrEnum):
    """The order of codes, scales and zeros on disk."""

    BYTES = "bytes"  # a code a byte, in rows
    WORDS = "words"  # several codes in a 32-bit word along a row
    AWQ = "awq"  # columns first, eight rows in a word, in an order of their own
    GPTQ = "gptq"  # columns first, eight columns in a word
    BLOCKS = "blocks"  # GGUF's: codes of some columns of a row beside what they share


class Role(StrEnum):
    """What one tensor of a matrix is for."""

    CODES = "codes"
    SCALES = "scales"
    ZEROS = "zeros"
    SHAPE = "shape"  # the matrix's own, as two numbers
    GROUPS = "groups"  # of each column, where they do not follow each other


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a scheme calls for.

    Attributes:
        suffix: of its name, after the module's.
        shapes: that it may have, the usual one first.
        dtypes: that it may have, as safetensors spells them.
        needed: it has to be there.
    """

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store a matrix.

    Attributes:
        name: the format, as config.json calls it.
        layout: the order on disk.
        codes: what is stored of a number.
        group: columns that share a scale; 0: all.
        rows: rows that share a scale; 0: all.
        symmetric: no zeros, or such as say nothing.
        reordered: columns may belong to groups in any order.
        zero_offset: what was taken off every zero before it was stored.
        scales: suffix of the scales' name, in formats that do not agree on it.
        inner_scales: the type of scales that lie in one tensor with codes.
        has_offsets: numbers are code · scale + offset.
        super_block: columns whose scales, and offsets, are integers times one number.
    """

    name: str
    layout: Layout
    codes: Codes
    group: int = 0
    rows: int = 1
    symmetric: bool = True
    reordered: bool = False
    zero_offset: int = 0
    scales: str = "weight_scale"
    inner_scales: Dtype | None = None
    has_offsets: bool = False
    super_block: int = 0

    def parts(self, shape: tuple[int, int], module: str) -> dict[Role, Part]:
        """The tensors that stand for a matrix.

        Raises:
            GroupMismatch: groups or words do not divide its rows or columns.
        """
        is_alone = self.rows == 1 and self.layout is not Layout.BLOCKS  # whose rows are whole
        if is_alone and self.group and shape[1] % self.group:
            raise GroupMismatch(module, self.name, self.group, "columns", shape[1])
        return _LAYOUTS[self.layout](self, shape, module)


def is_head(module: str) -> bool:
    """Whether a module is the LM head, of a model that may have others beside its text."""
    return module.rpartition(".")[2] == _HEAD


def is_router(module: str) -> bool:
    """Whether a module chooses experts: libraries leave it out, whether they say so or not."""
    return module.rpartition(".")[2] in _ROUTERS


# What a configuration says of a module: how it may be stored, in order of preference, and None
# for 16 bits. The tensors decide where there are several.
Method = Callable[[str], tuple[Scheme | None, ...]]


def all_but(is_listed: Callable[[str], bool], *schemes: Scheme) -> Method:
    """Every module is quantised but for those on a list; libraries leave the head out unasked."""

    def of(module: str) -> tuple[Scheme | None, ...]:
        if is_listed(module):
            return (None,)
        return (*schemes, None) if is_head(module) else schemes

    return of


_PLAIN_SCALES = ("F32", "BF16", "F16")


def _bytes(scheme: Scheme, shape: tuple[int, int], module: str) -> dict[Role, Part]:
    del module
    is_fp8 = scheme.codes is Codes.FP8
    scales = _scale_shapes(scheme, shape)
    # Scales in E8M0 are powers of two.
    types = (*_PLAIN_SCALES, "F8_E8M0") if is_fp8 else _PLAIN_SCALES
    parts = {
        Role.CODES: Part("weight", (shape,), ("F8_E4M3" if is_fp8 else "I8",)),
        Role.SCALES: Part(scheme.scales, scales, types),
    }
    if not scheme.symmetric:
        parts[Role.ZEROS] = Part("weight_zero_point", scales, ("I8",))
    return parts


def _words(scheme: Scheme, shape: tuple[int, int], module: str) -> dict[Role, Part]:
    rows, columns = shape
    per_word = 32 // scheme.codes.bits
    _require_pairs(scheme, columns, module)
    scales = _scale_shapes(scheme, shape)
    parts = {
        Role.CODES: Part("weight_packed", ((rows, -(-columns // per_word)),), ("I32",)),
        Role.SCALES: Part("weight_scale", scales, _PLAIN_SCALES),
        Role.SHAPE: Part("weight_shape", ((2,),), ("I64", "I32")),
    }
    if not scheme.symmetric:
        groups = scales[0][1] if len(scales[0]) == 2 else 1
        parts[Role.ZEROS] = Part("weight_zero_point", ((-(-rows // per_word), groups),), ("I32",))
    if scheme.reordered:
        parts[Role.GROUPS] = Part("weight_g_idx", ((columns,),), ("I32",))
    return parts


def _awq(scheme: Scheme, shape: tuple[int, int], module: str) -> dict[Role, Part]:
    rows, columns = shape
    _require_pairs(scheme, columns, module)
    _require_words(scheme, "rows", rows, module)
    groups = columns // (scheme.group or columns)
    return {
        Role.CODES: Part("qweight", ((columns, rows // 8),), ("I32",)),
        Role.SCALES: Part("scales", ((groups, rows),), _PLAIN_SCALES),
        Role.ZEROS: Part("qzeros", ((groups, rows // 8),), ("I32",)),
    }


def _gptq(scheme: Scheme, shape: tuple[int, int], module: str) -> dict[Role, Part]:
    rows, columns = shape
    per_word = 32 // scheme.codes.bits
    for what, count in (("rows", rows), ("columns", columns)):
        _require_words(scheme, what, count, module)
    groups = columns // (scheme.group or columns)
    return {
        Role.CODES: Part("qweight", ((columns // per_word, rows),), ("I32",)),
        Role.SCALES: Part("scales", ((groups, rows),), _PLAIN_SCALES),
        Role.ZEROS: Part("qzeros", ((groups, rows // per_word),), ("I32",)),
        Role.GROUPS: Part("g_idx", ((columns,),), ("I32",), needed=scheme.reordered),
    }


def _blocks(scheme: Scheme, shape: tuple[int, int], module: str) -> dict[Role, Part]:
    del module
    return {Role.CODES: Part("weight", (shape,), (scheme.name,))}


_LAYOUTS = {
    Layout.BYTES: _bytes,
    Layout.WORDS: _words,
    Layout.AWQ: _awq,
    Layout.GPTQ: _gptq,
    Layout.BLOCKS: _blocks,
}


def _scale_shapes(scheme: Scheme, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    if scheme.rows == 0:
        return ((1,), (), (1, 1))
    if not scheme.group:
        return ((rows, 1), (rows,))
    return ((-(-rows // scheme.rows), -(-columns // scheme.group)),)


def _require_pairs(scheme: Scheme, columns: int, module: str) -> None:
    if scheme.codes is Codes.INT4 and columns % 2:
        raise QuantizationMismatch(
            module, f"{columns} columns of 4 bits", "an even number, which fills whole bytes"
        )


def _require_words(scheme: Scheme, what: str, count: int, module: str) -> None:
    if count % (32 // scheme.codes.bits):
        raise GroupMismatch(module, scheme.name, 32 // scheme.codes.bits, what, count)
