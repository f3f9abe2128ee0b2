"""In which formats the decode kernel takes a model's matrices. Pure: no torch.

A matrix that is quantised in a way that the kernel reads keeps its codes; any other is read as
numbers, in 16 bits. So a model that runs in 16 bits runs quantised as well.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from soloist.errors import ShapeUnsupported
from soloist.megakernel.program import PRODUCTS, SHARED, matrix_shape, place_of
from soloist.megakernel.weight_format import GROUPS, WeightFormat, quantized_format
from soloist.model.config import ModelConfig
from soloist.model.quantized import Quantized
from soloist.parallel.share import share_of

_PRODUCTS = {product.name: product for product in (*PRODUCTS, *SHARED)}


def formats_of(
    stored: Mapping[str, Quantized], config: ModelConfig, ranks: int = 1
) -> dict[str, WeightFormat]:
    """Formats of the matrices that the kernel multiplies as they are stored.

    On several ranks what groups of columns share is repeated for smaller groups where a rank's
    columns are not whole groups; the format's meaning says for which. See `regrouped`.

    Args:
        stored: quantised matrices by the names of their tensors.
        config: the whole model.
        ranks: over how many it is spread.
    """
    found = {name: _format(name, quantized, config, ranks) for name, quantized in stored.items()}
    return {name: own for name, own in found.items() if own is not None}


def _format(name: str, stored: Quantized, config: ModelConfig, ranks: int) -> WeightFormat | None:
    short = _short(name)
    if short not in _PRODUCTS and (name != "head" or config.tied_head):
        return None
    if short == "qkv" and _mixes_rows(stored, config):
        stored = replace(stored, scale_rows=1)
    if ranks > 1:
        if stored.permuted and _is_cut_by_columns(short):
            return None
        common = _common_columns(name, config, ranks)
        if stored.super_block:
            return None if common % stored.super_block else _readable(stored)
        group = next((g for g in GROUPS if stored.group % g == 0 and common % g == 0), 0)
        if not group:
            return None
        stored = replace(stored, group=group)
    return _readable(stored)


def _readable(stored: Quantized) -> WeightFormat | None:
    try:
        return quantized_format(stored)
    except ShapeUnsupported:
        return None


def _mixes_rows(stored: Quantized, config: ModelConfig) -> bool:
    """Rows that share scales leave each other when those of a head are put into another order."""
    head_dim = config.layers[0].attention.head_dim
    return stored.scale_rows % head_dim > 0 and not config.rope.is_in_halves(head_dim)


def _is_cut_by_columns(short: str) -> bool:
    """Ranks have some of a matrix's columns each, and all of its rows."""
    return short in _PRODUCTS and _PRODUCTS[short].joins


def _short(name: str) -> str:
    """Of a layer's matrix the name of its product; of another tensor its own."""
    return place_of(name)[1] if name.startswith("layers.") else name


def _common_columns(name: str, config: ModelConfig, ranks: int) -> int:
    """A number of columns that divides every piece of a row that a rank may have."""
    if name == "head":
        return config.hidden_size
    layer, short = place_of(name)
    whole, own = (x.layers[layer] for x in (config, share_of(config, ranks)))
    sizes = [matrix_shape(short, x, config.hidden_size)[1] for x in (whole, own)]
    if short == "attention_output":
        sizes.append(whole.attention.head_dim)  # heads of a rank need not follow each other
    return gcd(*sizes)
