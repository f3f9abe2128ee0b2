"""In which order the parts of a format lie in a tile, and how its values share bytes. Torch.

Tensors by row are [rows, steps, columns of a step]; those of tiles have their dimensions named by
letters: b block, t tile, s step, n group of columns, and the digits of `megakernel/tile.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.megakernel.tile import (
    COLUMN_DIGITS,
    HALF_TILE_ORDER,
    HALF_TILE_ROWS,
    STEP_COLUMNS,
    TILE_ORDER,
)
from soloist.megakernel.weight_format import WeightFormat
from soloist.model.quantized import SCALES, ZEROS, Codes, Quantized
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
    """Codes, then scales, then zeros, as the kernel's readers find them (cuda/tile/formats.cuh)."""

    def __init__(self, stored: WeightFormat) -> None:
        assert stored.meaning is not None, "values that stand for themselves have no scales"
        self._format, self._meaning = stored, stored.meaning
        tile, half_tile = {
            Codes.INT4: ("wgqpmreh", "wgqmrep"),
            Codes.INT8: ("pwgqmhre", "wgqpmre"),
            Codes.FP8: ("pwgqmrhe", "wgqpmre"),
        }[self._meaning.codes]
        groups = (("n", stored.step_groups),)
        self._orders = [Order(_COLUMNS, tile, half_tile)]
        self._orders.append(Order(groups, "ngh", "ng", stored.scale_rows))
        if stored.zero_bits:
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
        regrouped = [in_groups(x, self._meaning, self._format.group, columns) for x in shared]
        return [
            _in_steps(codes.view(torch.uint8), steps, STEP_COLUMNS),
            *(_in_steps(x, steps, self._format.step_groups) for x in regrouped),
        ]

    def packed(self, units: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """See Layout."""
        tiles = [order.of_tiles(x) for order, x in zip(self._orders, units, strict=True)]
        halves = [order.of_half_tiles(x) for order, x in zip(self._orders, units, strict=True)]
        return self._bytes(tiles, 2), self._bytes(halves, 1)

    def unpacked(self, tiles: Tensor, halves: Tensor) -> list[Tensor]:
        """See Layout."""
        parted = zip(self._orders, self._values(tiles, 2), self._values(halves, 1), strict=True)
        return [order.to_units(tile, half) for order, tile, half in parted]

    def parts(self, by_row: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
        """See Layout."""
        codes, scales, *zeros = (x.flatten(1) for x in by_row)
        codes, groups = codes[:, :columns], -(-columns // self._format.group)
        scales = scales[:, :groups]
        found = {"": _as_stored(codes, self._meaning.codes), SCALES: scales}
        if zeros:
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
        sizes = [
            half_tiles * size
            for size in (
                stored.half_tile_values_bytes,
                stored.half_tile_scales_bytes,
                stored.half_tile_zeros_bytes,
            )
        ]
        codes, scales, zeros = tiles[..., : sum(sizes)].split(sizes, dim=-1)
        if self._meaning.codes is Codes.INT4:
            codes = _parted_nibbles(codes)
        found = [codes, scales.contiguous().view(self._scale_type)]
        return [*found, zeros] if stored.zero_bits else found

    @property
    def _scale_type(self) -> torch.dtype:
        is_fp8 = self._meaning.codes is Codes.FP8
        return torch.float32 if is_fp8 else TORCH_DTYPES[self._meaning.scale_dtype]


def _in_steps(values: Tensor, steps: int, each: int) -> Tensor:
    """[rows, columns] → [rows, steps, each], with columns of padding."""
    padded = pad(values, (0, steps * each - values.shape[1]))
    return padded.view(-1, steps, each)


def in_groups(values: Tensor, given: Quantized, group: int, columns: int) -> Tensor:
    """What groups of a row share, for smaller groups."""
    starts = torch.arange(0, columns, group, device=values.device)
    return values[:, starts // given.group if given.group else torch.zeros_like(starts)]


def _as_stored(codes: Tensor, kind: Codes) -> Tensor:
    if kind is Codes.INT4:
        return codes[:, ::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.int8 if kind is Codes.INT8 else torch.float8_e4m3fn)


@cache
def layout_of(stored: WeightFormat) -> Layout:
    """That of a format."""
    return PlainLayout() if stored.is_plain else QuantizedLayout(stored)
