"""How the numbers of a KV cache are stored, and how many bytes that takes. Pure."""

from dataclasses import dataclass

from soloist.model.dtype import Dtype


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A format of keys and values.

    Attributes:
        name: as users know it.
        value_bits: of a stored number.
        scale_values: how many consecutive numbers share a scale; 0 where there are no scales.
        scale_bits: of a scale.
        parts: what is stored of a head's positions, in this order.
    """

    name: str
    value_bits: int
    scale_values: int = 0
    scale_bits: int = 0
    parts: tuple[str, ...] = ("keys", "values")

    def num_bytes(self, num_values: int) -> int:
        """Bytes of so many numbers with their scales: whole bytes, and whole groups of a scale."""
        scales = num_values // self.scale_values if self.scale_values else 0
        return (num_values * self.value_bits + scales * self.scale_bits) // 8


def plain(dtype: Dtype) -> KvFormat:
    """Numbers as they are, without scales."""
    return KvFormat(dtype.value, 8 * dtype.num_bytes)


# What pages of the decode kernel hold.
PAGE_FORMATS = {dtype: plain(dtype) for dtype in (Dtype.BF16, Dtype.FP16)}
