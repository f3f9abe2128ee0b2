"""How a quantised matrix stands for its numbers: (code - zero) · scale. Pure: no torch, no files.

Every format that checkpoints are quantised in is read into this one. A matrix [N, K] is then up to
four tensors, named after the matrix and the part: 'layers.0.qkv' has its codes,
'layers.0.qkv.scales' and 'layers.0.qkv.zeros' [N, G] what each row's G groups of columns share.
Some of GGUF's types mean code · scale + offset instead, with 'layers.0.qkv.offsets' [N, G].
Its K-quants have scales within scales: a super-block of columns has one number, which is multiplied
with an integer for each of its groups, and likewise for offsets, which are taken off. See
`Quantized.super_block`.
Where a file puts columns into groups in an order of its own, codes lie by group, and
'layers.0.qkv.columns', uint16 [K], says which column of the matrix each column of codes is.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from soloist.errors import NoGroupFits
from soloist.model.dtype import Dtype

SCALES, ZEROS, OFFSETS, COLUMNS = ".scales", ".zeros", ".offsets", ".columns"
SUPER_SCALES, SUPER_OFFSETS = ".super_scales", ".super_offsets"
# Columns that share an offset within a super-block, however many share a scale.
OFFSET_COLUMNS = 32
# Columns of a matrix that a table of columns can name.
MOST_COLUMNS = 1 << 16

# Columns that may share a scale of 4-bit codes when Soloist quantises: what kernels elsewhere take.
GROUPS = (128, 64, 32)


class Codes(StrEnum):
    """What is stored of every number."""

    INT4 = "int4"  # 0 … 15; uint8 [N, K / 2], an even column in the low half of its byte
    INT6 = "int6"  # -32 … 31; int8 [N, K]
    INT8 = "int8"  # -128 … 127; int8 [N, K]
    FP8 = "fp8"  # e4m3 without infinities; float8_e4m3fn [N, K]

    @property
    def bits(self) -> int:
        """Of one code."""
        return {Codes.INT4: 4, Codes.INT6: 6}.get(self, 8)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a matrix's tensors mean.

    Attributes:
        codes: of its numbers.
        group: consecutive columns of a row that share a scale, and a zero; 0: all of them. The last
            group of a row may have fewer.
        scale_dtype: of the scales.
        has_zeros: zeros are stored, uint8 beside INT4 and int8 beside INT8. Otherwise INT4's zero
            is 8, and that of others 0.
        scale_rows: consecutive rows, counted from the first, that have the same scales, although
            each has its own in the tensor.
        permuted: columns of codes are in another order than those of the matrix.
        has_offsets: offsets are stored, in the type of the scales; then no code has a zero.
        super_block: columns of a row whose scales are integers, int8 [N, G], times one number in
            `scale_dtype`, '.super_scales' [N, K / super_block]; 0: scales are numbers themselves.
            Offsets are then uint8 [N, K / `OFFSET_COLUMNS`], times '.super_offsets', and taken off.
    """

    codes: Codes
    group: int
    scale_dtype: Dtype
    has_zeros: bool = False
    scale_rows: int = 1
    permuted: bool = False
    has_offsets: bool = False
    super_block: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """What is added to a matrix's name to name each of its tensors."""
        return (
            "",
            SCALES,
            *((ZEROS,) if self.has_zeros else ()),
            *((OFFSETS,) if self.has_offsets else ()),
            *((SUPER_SCALES,) if self.super_block else ()),
            *((SUPER_OFFSETS,) if self.super_block and self.has_offsets else ()),
            *((COLUMNS,) if self.permuted else ()),
        )

    @property
    def label(self) -> str:
        """What result files and people call it."""
        if self.permuted:
            return f"{self.codes.value}-permuted"
        if self.has_offsets:
            return f"{self.codes.value}-offset"
        return f"{self.codes.value}-block" if self.scale_rows > 1 else self.codes.value

    def groups(self, columns: int) -> int:
        """G of a matrix with so many columns."""
        return -(-columns // self.group) if self.group else 1


def widest(kinds: Collection[Quantized]) -> Quantized | None:
    """One in which rows of all these can be written exactly; None if there is none.

    Different kinds have one if they differ in no more than how wide codes, groups and offsets of
    equal super-blocks are.
    """
    first = next(iter(kinds))
    found = replace(
        first,
        codes=max((one.codes for one in kinds), key=lambda codes: codes.bits),
        group=min(one.group for one in kinds),
        has_offsets=any(one.has_offsets for one in kinds),
    )
    alike = {replace(found, codes=k.codes, group=k.group, has_offsets=k.has_offsets) for k in kinds}
    return found if len(kinds) == 1 or (found.super_block and alike == set(kinds)) else None


# What people may ask for by name where a 16-bit checkpoint is quantised. All three are symmetric.
AT_LOAD = {codes.value: codes for codes in (Codes.INT4, Codes.INT8, Codes.FP8)}


def rounded(
    tensor: str, columns: int, codes: Codes, scale_dtype: Dtype, most: int = GROUPS[0]
) -> Quantized:
    """What a 16-bit matrix becomes if its numbers are rounded to codes.

    INT8 and FP8 have one scale a row. INT4 has one for each group of columns: the largest of
    GROUPS, but at most `most`, that divides the row. Matrices of one model may differ in it.

    Args:
        tensor: the matrix's name, for the error.
        columns: of the matrix.
        codes: of its numbers.
        scale_dtype: the matrix's own type.
        most: columns that may share a scale of INT4.

    Raises:
        NoGroupFits: the row of an INT4 matrix has no such group.
    """
    if codes is not Codes.INT4:
        return Quantized(codes, group=0, scale_dtype=scale_dtype)
    allowed = [group for group in GROUPS if group <= most]
    for group in allowed:
        if columns % group == 0:
            return Quantized(codes, group, scale_dtype)
    raise NoGroupFits(tensor, columns, allowed)


def label(layers: Iterable[Quantized | None], head: Quantized | None, plain: str) -> str:
    """What result files call a model's weights: 'int4', or with a quantised head 'int4+int8 head'.

    Args:
        layers: the layers' matrices; None for one that stands for itself.
        head: likewise.
        plain: what these are in.
    """
    names = dict.fromkeys(plain if one is None else one.label for one in layers)
    return "+".join([*names, *([] if head is None else [f"{head.label} head"])])


def words(layers: Iterable[Quantized | None], head: Quantized | None, plain: str) -> str:
    """The same for people: 'int4 (groups of 128), head bf16'; of one precision only its name."""
    told = _words(layers, plain)
    own = _words([head], plain)
    return plain if told == own == plain else f"{told}, head {own}"


def _words(all_of_them: Iterable[Quantized | None], plain: str) -> str:
    """Names, each with what shares a scale: 'int4 (groups of 64 and 128), bf16'."""
    shared: dict[str, dict[str, None]] = {}
    for one in sorted(all_of_them, key=lambda one: 0 if one is None else one.group):
        name = plain if one is None else one.label
        shared.setdefault(name, {})
        if one is not None:
            shared[name][_shared(one)] = None
    told = (
        f"{name} ({' and '.join(found)})".replace(" and groups of", " and") if found else name
        for name, found in shared.items()
    )
    return ", ".join(told)


def _shared(one: Quantized) -> str:
    if one.scale_rows > 1:
        return f"blocks of {one.scale_rows} × {one.group}"
    return f"groups of {one.group}" if one.group else "one scale a row"
