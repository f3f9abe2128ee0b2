"""How the numbers of a KV cache are stored, and how many bytes that takes. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from soloist.errors import SettingError
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype

# What --kv names.
KvName = Literal["int8", "fp8", "int4"]

# In 4 bits larger groups cost too much: docs/accuracy.md.
_INT4_GROUP = 32
_SCALE_BITS = 16


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

    @property
    def is_plain(self) -> bool:
        """Whether numbers are stored as they are."""
        return self.scale_values == 0


def plain(dtype: Dtype) -> KvFormat:
    """Numbers as they are, without scales."""
    return KvFormat(dtype.value, 8 * dtype.num_bytes)


# What pages of the decode kernel hold.
PAGE_FORMATS = {dtype: plain(dtype) for dtype in (Dtype.BF16, Dtype.FP16)}


# Each for heads of D numbers. A scale belongs to one position and head, so that positions can be
# appended, taken back and copied without regard to others.
KV_FORMATS: dict[KvName, Callable[[int], KvFormat]] = {
    "int8": lambda dim: KvFormat("int8", 8, dim, _SCALE_BITS),
    "fp8": lambda dim: KvFormat("fp8", 8, dim, _SCALE_BITS),
    "int4": lambda _: KvFormat("int4", 4, _INT4_GROUP, _SCALE_BITS),
}


def kv_format(name: KvName | None, config: ModelConfig, dtype: Dtype) -> KvFormat:
    """How a model's keys and values are stored.

    Args:
        name: as of `--kv`; None stores numbers in the precision of the model.
        config: of the model.
        dtype: its precision.

    Raises:
        SettingError: an unknown name, or heads that have no such format.
    """
    if name is None:
        return plain(dtype)
    if name not in KV_FORMATS:
        raise SettingError("--kv", name, ", ".join(KV_FORMATS))
    dims = {layer.attention.head_dim for layer in config.layers}
    found = KV_FORMATS[name](min(dims))
    if len(dims) > 1:
        raise SettingError("--kv", name, "heads of one size in all layers", "leave out --kv")
    if (dim := dims.pop()) % found.scale_values:
        raise SettingError(
            "--kv", name,
            f"heads of a multiple of {found.scale_values} numbers; this model's have {dim}",
            "take --kv int8",
        )  # fmt: skip
    return found
