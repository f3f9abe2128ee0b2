"""In which order the parts of a format lie in a tile, and how its values share bytes. Torch.

Tensors by row are [rows, steps, columns of a step]; those of tiles have their dimensions named by
letters: b block, t tile, s step, n group of columns, and the digits of `megakernel/tile.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.partition import Matrix
from soloist.megakernel.tile import (
    COLUMN_DIGITS,
    HALF_TILE_ORDER,
    HALF_TILE_ROWS,
    STEP_COLUMNS,
    TILE_ORDER,
    WARP_COLUMNS,
)
from soloist.megakernel.weight_format import SUPER_BLOCK, WeightFormat
from soloist.model.quantized import (
    OFFSET_COLUMNS,
    OFFSETS,
    SCALES,
    SUPER_OFFSETS,
    SUPER_SCALES,
    ZEROS,
    Codes,
    Quantized,
)
from soloist.model.torch_types import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class Order:
    """Where the values of one part lie in a tile, and in a half tile.

    Attributes:
        columns: dimensions of one step of columns with their sizes, slowest first.
        tile: all dimensions of a full tile in the order of its values, slowest first.
        half_tile: the same of a half tile.
        row_step: of how many rows one has a value.
    """

    columns: tuple[tuple[str, int], ...]
    tile: str
    half_tile: str
    row_step: int = 1

    def of_tiles(self, units: Tensor) -> Tensor:
        """[blocks, half tiles, 8 rows, steps, columns] → [blocks, steps, tiles, values]."""
        full = units.shape[1] // 2 * 2
        return self._permuted(units[:, :full].unflatten(1, (-1, 2)), "bthgs", self.tile)

    def of_half_tiles(self, units: Tensor) -> Tensor:
        """Of what is left over, [blocks, steps, 0 or 1, values]."""
        full = units.shape[1] // 2 * 2
        return self._permuted(units[:, full:], "btgs", self.half_tile)

    def to_units(self, tiles: Tensor, halves: Tensor) -> Tensor:
        """The inverse of both."""
        from_tiles = self._restored(tiles, "bthgs", self.tile).flatten(1, 2)
        return torch.cat([from_tiles, self._restored(halves, "btgs", self.half_tile)], dim=1)

    def _permuted(self, units: Tensor, first: str, order: str) -> Tensor:
        rows = units[..., :: self.row_step, :, :]
        digits = rows.unflatten(-1, [size for _, size in self.columns])
        names = first + "".join(name for name, _ in self.columns)
        moved: Tensor = digits.permute([names.index(name) for name in "bst" + order])
        return moved.flatten(3)

    def _restored(self, values: Tensor, first: str, order: str) -> Tensor:
        names = first + "".join(name for name, _ in self.columns)
        blocks, steps, tiles = values.shape[:3]
        sizes = {"b": blocks, "s": steps, "t": tiles, "h": 2, **dict(self.columns)}
        sizes["g"] = HALF_TILE_ROWS // self.row_step
        given = "bst" + order
        split = values.reshape([sizes[name] for name in given])
        units = split.permute([given.index(name) for name in names]).flatten(len(first))
        return units.repeat_interleave(self.row_step, dim=first.index("g"))


_COLUMNS = tuple(COLUMN_DIGITS.items())


class Layout(ABC):
    """How the tensors of a matrix become tiles, and tiles tensors."""

    @abstractmethod
    def by_row(self, parts: Mapping[str, Tensor], steps: int) -> list[Tensor]:
        """What lies in tiles, by row: [rows, steps, columns or groups], with columns of padding."""

    @abstractmethod
    def packed(self, units: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """[blocks, half tiles, 8 rows, …] of each → tiles and half tiles, with values or bytes."""

    @abstractmethod
    def unpacked(self, tiles: Tensor, halves: Tensor) -> list[Tensor]:
        """The inverse of `packed`."""

    @abstractmethod
    def parts(self, by_row: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
        """The inverse of `by_row`, but for what the kernel stores otherwise on purpose."""


class PlainLayout(Layout):
    """Values that stand for themselves, of any size."""

    _order = Order(_COLUMNS, TILE_ORDER, HALF_TILE_ORDER)

    def by_row(self, parts: Mapping[str, Tensor], steps: int) -> list[Tensor]:
        """See Layout."""
        return [_in_steps(parts[""], steps, STEP_COLUMNS)]

    def packed(self, units: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See Layout."""
        return self._order.of_tiles(units[0]), self._order.of_half_tiles(units[0])

    def unpacked(self, tiles: Tensor, halves: Tensor) -> list[Tensor]:
        """See Layout."""
        return [self._order.to_units(tiles, halves)]

    def parts(self, by_row: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
        """See Layout."""
        return {"": by_row[0].flatten(1)[:, :columns]}


# Values of a tile that lie side by side share a byte, and the inverse.
def _joined_nibbles(values: Tensor) -> Tensor:
    return values[..., ::2] | values[..., 1::2] << 4


def _parted_nibbles(values: Tensor) -> Tensor:
    return torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)


class QuantizedLayout(Layout):
    """Codes, scales, and zeros or offsets, as the kernel's readers find them (tile/formats.cuh).

    Where steps are paired, the tile of the first has the scales and zeros of rows g in both steps,
    the tile of the second the ones of rows g + 8.
    """

    def __init__(self, stored: WeightFormat, *, pairs_steps: bool) -> None:
        assert stored.meaning is not None, "values that stand for themselves have no scales"
        self._format, self._meaning, self._pairs_steps = stored, stored.meaning, pairs_steps
        tile, half_tile = {
            Codes.INT4: ("wgqpmreh", "wgqmrep"),
            Codes.INT8: ("pwgqmhre", "wgqpmre"),
            Codes.FP8: ("pwgqmrhe", "wgqpmre"),
        }[self._meaning.codes]
        groups = (("n", stored.step_groups),)
        self._orders = [Order(_COLUMNS, tile, half_tile)]
        self._orders.append(Order(groups, "ngh", "ng", stored.scale_rows))
        if stored.zero_bits or stored.offset_bits:
            self._orders.append(Order(groups, "ngh", "ng"))

    def by_row(self, parts: Mapping[str, Tensor], steps: int) -> list[Tensor]:
        """See Layout."""
        codes = parts[""]
        if self._meaning.codes is Codes.INT4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        columns = codes.shape[1]
        shared = [parts[SCALES].to(self._scale_type)]
        if ZEROS in parts:
            shared.append(parts[ZEROS].view(torch.uint8))
        if OFFSETS in parts:
            shared.append(parts[OFFSETS].to(self._scale_type))
        regrouped = [in_groups(x, self._meaning, self._format.group, columns) for x in shared]
        stepped = _in_steps(codes.view(torch.uint8), steps, STEP_COLUMNS)
        return [
            with_paired_columns(stepped) if self._pairs_steps else stepped,
            *(_in_steps(x, steps, self._format.step_groups) for x in regrouped),
        ]

    def packed(self, units: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See Layout."""
        if self._pairs_steps:
            units = [units[0], *map(_halves_for_steps, units[1:])]
        tiles = [order.of_tiles(x) for order, x in zip(self._orders, units, strict=True)]
        halves = [order.of_half_tiles(x) for order, x in zip(self._orders, units, strict=True)]
        return self._bytes(tiles, 2), self._bytes(halves, 1)

    def unpacked(self, tiles: Tensor, halves: Tensor) -> list[Tensor]:
        """See Layout."""
        parted = zip(self._orders, self._values(tiles, 2), self._values(halves, 1), strict=True)
        units = [order.to_units(tile, half) for order, tile, half in parted]
        return [units[0], *map(_halves_for_steps, units[1:])] if self._pairs_steps else units

    def parts(self, by_row: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
        """See Layout."""
        stepped, *shared = by_row
        if self._pairs_steps:
            stepped = without_paired_columns(stepped)
        codes, scales, *zeros = (x.flatten(1) for x in (stepped, *shared))
        codes, groups = codes[:, :columns], -(-columns // self._format.group)
        scales = scales[:, :groups]
        found = {"": _as_stored(codes, self._meaning.codes), SCALES: scales}
        if zeros and self._format.offset_bits:
            found[OFFSETS] = zeros[0][:, :groups]
        elif zeros:
            zero = torch.uint8 if self._meaning.codes is Codes.INT4 else torch.int8
            found[ZEROS] = zeros[0][:, :groups].contiguous().view(zero)
        return found

    def _bytes(self, values: Sequence[Tensor], half_tiles: int) -> Tensor:
        codes, *shared = values
        if self._meaning.codes is Codes.INT4:
            codes = _joined_nibbles(codes)
        joined = [codes, *(x.contiguous().view(torch.uint8) for x in shared)]
        together = torch.cat(joined, dim=-1)
        return pad(together, (0, half_tiles * self._format.half_tile_bytes - together.shape[-1]))

    def _values(self, tiles: Tensor, half_tiles: int) -> list[Tensor]:
        stored = self._format
        sizes = [half_tiles * size for size in stored.half_tile_parts_bytes[:3]]
        codes, scales, zeros = tiles[..., : sum(sizes)].split(sizes, dim=-1)
        if self._meaning.codes is Codes.INT4:
            codes = _parted_nibbles(codes)
        found = [codes, scales.contiguous().view(self._scale_type)]
        if stored.offset_bits:
            return [*found, zeros.contiguous().view(self._scale_type)]
        return [*found, zeros] if stored.zero_bits else found

    @property
    def _scale_type(self) -> torch.dtype:
        is_fp8 = self._meaning.codes is Codes.FP8
        return torch.float32 if is_fp8 else TORCH_DTYPES[self._meaning.scale_dtype]


_WARPS = COLUMN_DIGITS["w"]
_NIBBLES, _SIXES = ("wgqpmreh", "wgqmrep"), ("wgqpmhre", "wgqpmre")


class SuperBlockLayout(Layout):
    """Codes, what groups have, then what super-blocks have, as the kernel's reader finds them.

    Of four words of codes of six bits the fourth lies in the spare bits of the others; a lane's 24
    or 12 bytes are in two places, for a load each. What groups have lies by warp. Where steps are
    paired, what super-blocks have lies as scales of other formats do: the tile of the first step
    has that of rows g in both. Offsets of whole tiles lie beside the scales that the same lane
    reads.
    """

    def __init__(self, stored: WeightFormat, *, pairs_steps: bool) -> None:
        assert stored.meaning is not None, "super-blocks have scales"
        self._format, self._meaning, self._pairs_steps = stored, stored.meaning, pairs_steps
        self._codes = Order(_COLUMNS, *(_SIXES if self._has_sixes else _NIBBLES))
        supers = Order((("n", STEP_COLUMNS // stored.super_block),), "ngh", "ng")
        self._shared = {
            part: supers if part in _OF_SUPER_BLOCKS else _by_warp(each, part)
            for part, each in self._columns_of.items()
        }

    @property
    def _has_sixes(self) -> bool:
        return self._meaning.codes is Codes.INT6

    @property
    def _columns_of(self) -> dict[str, int]:
        """Columns that share a number of each part but the codes, in the order of the parts."""
        stored = self._format
        each = {
            SCALES: stored.group, OFFSETS: OFFSET_COLUMNS,
            SUPER_SCALES: stored.super_block, SUPER_OFFSETS: stored.super_block,
        }  # fmt: skip
        return {part: each[part] for part in self._meaning.parts if part in each}

    def by_row(self, parts: Mapping[str, Tensor], steps: int) -> list[Tensor]:
        """See Layout."""
        codes = parts[""]
        codes = codes.view(torch.uint8) if self._has_sixes else _parted_nibbles(codes)
        found = [_in_steps(codes, steps, STEP_COLUMNS)]
        for part, each in self._columns_of.items():
            values = parts[part]
            values = values if part in _OF_SUPER_BLOCKS else values.view(torch.uint8)
            found.append(_in_steps(values, steps, STEP_COLUMNS // each))
        return self._columns_changed(found, with_paired_columns)

    def _columns_changed(
        self, by_row: Sequence[Tensor], change: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """What each warp has of paired steps, or the inverse; super-blocks stay in order."""
        if not self._pairs_steps:
            return list(by_row)
        codes, *shared = by_row
        named = zip(self._shared, shared, strict=True)
        return [
            change(codes),
            *(x if part in _OF_SUPER_BLOCKS else change(x) for part, x in named),
        ]

    def _supers_changed(self, units: Sequence[Tensor]) -> list[Tensor]:
        if not self._pairs_steps:
            return list(units)
        codes, *shared = units
        named = zip(self._shared, shared, strict=True)
        return [
            codes,
            *(_halves_for_steps(x) if part in _OF_SUPER_BLOCKS else x for part, x in named),
        ]

    def packed(self, units: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See Layout."""
        units = self._supers_changed(units)
        return self._bytes(units, 2), self._bytes(units, 1)

    def _bytes(self, units: Sequence[Tensor], half_tiles: int) -> Tensor:
        def of(order: Order, values: Tensor) -> Tensor:
            return order.of_tiles(values) if half_tiles == 2 else order.of_half_tiles(values)

        codes, *shared = units
        codes = of(self._codes, codes)
        made = [_joined_sixes(codes, half_tiles) if self._has_sixes else _joined_nibbles(codes)]
        for order, values in zip(self._shared.values(), shared, strict=True):
            made.append(of(order, values).contiguous().view(torch.uint8))
        if half_tiles == 2 and self._format.offset_bits:
            codes, *shared = made
            made = [
                codes,
                *(
                    _side_by_side(*of_kind)
                    for of_kind in zip(_PLACES, shared[::2], shared[1::2], strict=True)
                ),
            ]
        return torch.cat(made, dim=-1)

    def unpacked(self, tiles: Tensor, halves: Tensor) -> list[Tensor]:
        """See Layout."""
        parted = zip(self._values(tiles, 2), self._values(halves, 1), strict=True)
        orders = [self._codes, *self._shared.values()]
        codes, *shared = (order.to_units(*both) for order, both in zip(orders, parted, strict=True))
        if self._has_sixes:
            codes = (codes ^ 32) - 32  # with their sign
        return self._supers_changed([codes, *shared])

    def _values(self, tiles: Tensor, half_tiles: int) -> list[Tensor]:
        sizes = [half_tiles * size for size in self._format.half_tile_parts_bytes if size]
        codes, *shared = tiles[..., : sum(sizes)].split(sizes, dim=-1)
        if half_tiles == 2 and self._format.offset_bits:
            pairs = zip(_PLACES, shared[::2], shared[1::2], strict=True)
            shared = [part for places, *both in pairs for part in _apart(places, *both)]
        found = [_parted_sixes(codes, half_tiles) if self._has_sixes else _parted_nibbles(codes)]
        for part, values in zip(self._shared, shared, strict=True):
            is_super = part in _OF_SUPER_BLOCKS
            found.append(values.contiguous().view(self._super_type) if is_super else values)
        return found

    def parts(self, by_row: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
        """See Layout."""
        stepped, *shared = self._columns_changed(by_row, without_paired_columns)
        found = {"": _as_stored(stepped.flatten(1)[:, :columns], self._meaning.codes)}
        for (part, each), values in zip(self._columns_of.items(), shared, strict=True):
            found[part] = values.flatten(1)[:, : -(-columns // each)].contiguous()
        found[SCALES] = found[SCALES].view(torch.int8)
        return found

    @property
    def _super_type(self) -> torch.dtype:
        return TORCH_DTYPES[self._meaning.scale_dtype]


_OF_SUPER_BLOCKS = (SUPER_SCALES, SUPER_OFFSETS)


def _by_warp(each: int, part: str) -> Order:
    """What groups of so many columns have: a lane reads that of its warp's columns at once.

    Two offsets of a row are multiplied together.
    """
    tile = "wghn" if part == OFFSETS else "wgnh"
    return Order((("w", _WARPS), ("n", WARP_COLUMNS // each)), tile, "wgn")


# Of a tile: rows of warps that have scales and offsets, and of super-blocks.
_PLACES = (_WARPS * HALF_TILE_ROWS, STEP_COLUMNS // SUPER_BLOCK * 2 * HALF_TILE_ROWS)


def _side_by_side(places: int, *parts: Tensor) -> Tensor:
    """Bytes of parts, together for each of so many places."""
    return torch.cat([part.unflatten(-1, (places, -1)) for part in parts], dim=-1).flatten(-2)


def _apart(places: int, *parts: Tensor) -> list[Tensor]:
    """The inverse; parts have the bytes of all of them, cut anywhere."""
    sizes = [part.shape[-1] // places for part in parts]
    joined = torch.cat(parts, dim=-1).unflatten(-1, (places, -1))
    return [part.flatten(-2) for part in joined.split(sizes, dim=-1)]


def _joined_sixes(codes: Tensor, half_tiles: int) -> Tensor:
    """Of four words of four codes three; the first two thirds of each lane's come before the last.

    A byte has a code and, below it, two bits of the fourth word's code in the same place.
    """
    *first, last = (codes & 63).unflatten(-1, (-1, half_tiles, 4, 4)).unbind(-2)
    words = [word << 2 | last >> 2 * (2 - i) & 3 for i, word in enumerate(first)]
    lanes = torch.stack(words, dim=-2).flatten(-3).split([8 * half_tiles, 4 * half_tiles], dim=-1)
    return torch.cat([part.flatten(-2) for part in lanes], dim=-1)


def _parted_sixes(joined: Tensor, half_tiles: int) -> Tensor:
    """The inverse, without the codes' signs."""
    size = joined.shape[-1] // 3
    parts = [
        part.unflatten(-1, (size // (4 * half_tiles), -1))
        for part in joined.split([2 * size, size], dim=-1)
    ]
    words = torch.cat(parts, dim=-1).unflatten(-1, (half_tiles, 3, 4))
    low = words & 3
    last = low[..., 0, :] << 4 | low[..., 1, :] << 2 | low[..., 2, :]
    return torch.cat([words >> 2, last[..., None, :]], dim=-2).flatten(-4)


def _in_steps(values: Tensor, steps: int, each: int) -> Tensor:
    """[rows, columns] → [rows, steps, each], with columns of padding."""
    padded = pad(values, (0, steps * each - values.shape[1]))
    return padded.view(-1, steps, each)


def with_paired_columns(stepped: Tensor) -> Tensor:
    """[..., steps, columns or groups] → the same with a warp's neighbouring ones in two steps."""
    each = stepped.shape[-1] // COLUMN_DIGITS["w"]
    by_warp = stepped.reshape(*stepped.shape[:-2], -1, COLUMN_DIGITS["w"], 2, each)
    paired: Tensor = by_warp.transpose(-3, -2).reshape(stepped.shape)
    return paired


def without_paired_columns(stepped: Tensor) -> Tensor:
    """The inverse of `with_paired_columns`."""
    each = stepped.shape[-1] // COLUMN_DIGITS["w"]
    by_step = stepped.reshape(*stepped.shape[:-2], -1, 2, COLUMN_DIGITS["w"], each)
    parted: Tensor = by_step.transpose(-3, -2).reshape(stepped.shape)
    return parted


def _halves_for_steps(units: Tensor) -> Tensor:
    """[blocks, half tiles, 8, steps, …]: halves of a tile and steps of a pair change places."""
    parted = units.unflatten(3, (-1, 2)).unflatten(1, (-1, 2))
    changed: Tensor = parted.transpose(2, 5).flatten(4, 5).flatten(1, 2)
    return changed


def in_groups(values: Tensor, given: Quantized, group: int, columns: int) -> Tensor:
    """What groups of a row share, for smaller groups."""
    starts = torch.arange(0, columns, group, device=values.device)
    return values[:, starts // given.group if given.group else torch.zeros_like(starts)]


def _as_stored(codes: Tensor, kind: Codes) -> Tensor:
    if kind is Codes.INT4:
        return codes[:, ::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.float8_e4m3fn if kind is Codes.FP8 else torch.int8)


def layout_of(matrix: Matrix) -> Layout:
    """That of a matrix."""
    return _layout_of(matrix.format, pairs_steps=matrix.pairs_steps)


@cache
def _layout_of(stored: WeightFormat, *, pairs_steps: bool) -> Layout:
    if stored.is_plain:
        return PlainLayout()
    if stored.super_block:
        return SuperBlockLayout(stored, pairs_steps=pairs_steps)
    return QuantizedLayout(stored, pairs_steps=pairs_steps)
