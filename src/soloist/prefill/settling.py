"""Which widths are batch-invariant for a model's products and attention, tried on its matrices."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from soloist.megakernel.program import OF_EXPERTS, place_of
from soloist.model.config import Mixture
from soloist.prefill.invariance import attention_is_invariant, product_behaviours
from soloist.prefill.part import Part
from soloist.prefill.products import Arranged
from soloist.prefill.widths import Widths, batch_invariant_widths, candidate_widths

Behaviours = dict[int, dict[str, Hashable | None]]


def settled_widths(parts: Sequence[Part]) -> Widths | None:
    """Widths at which all ranks' products and attention are batch-invariant, if any."""
    if not all(tries_widths(part) and experts_are_invariant(part) for part in parts):
        return None
    of_parts = [behaviours(part) for part in parts]
    everywhere = {
        width: {name: _combined([of_one[width][name] for of_one in of_parts]) for name in seen}
        for width, seen in of_parts[0].items()
    }
    # Products from packed tiles take the rows that they are given.
    in_rows = all(part.work.products.in_rows for part in parts)
    widths = batch_invariant_widths(everywhere, parts[0].work.streams.padded if in_rows else ())
    if widths is None:
        return None
    # Attention may take another form for few queries.
    tried = dict.fromkeys((widths.passes, widths.of_chunks().passes))
    for passes in tried:
        if all(attention_is_invariant_at(part, passes) for part in parts):
            return replace(widths, passes=passes)
    return None


def tries_widths(part: Part) -> bool:
    """Whether wider passes would be worth anything: elsewhere there are no 16-bit libraries."""
    return part.pool.device.type == "cuda" and part.pool.dtype.itemsize == 2


@torch.inference_mode()
def behaviours(part: Part) -> Behaviours:
    """Of every candidate width and product, for `batch_invariant_widths`."""
    part.work.operations.start()
    part.work.products.pads = False  # every pass says so anew
    candidates, like = candidate_widths(part.most_tokens), part.work.buffers.normed
    of_products: dict[str, list[dict[int, int | None]]] = {}
    for name, first in products_of(part):
        columns, _ = part.work.products.behaviour(name)
        multiply = partial(multiply_as_a_pass, part, name, first)
        seen = product_behaviours(multiply, columns, candidates, like)
        of_products.setdefault(name.rpartition(".")[2], []).append(seen)
    return {
        width: {
            short: _combined([one[width] for one in several])
            for short, several in of_products.items()
        }
        for width in candidates
    }


@torch.inference_mode()
def attention_is_invariant_at(part: Part, widths: tuple[int, ...]) -> bool:
    """Whether attention gives the same bits at these widths; what reads pages does at all."""
    if part.work.operations.attends_pages:
        return True
    config = part.work.config
    a, most_keys = config.layers[0].attention, config.context_tokens
    heads = (a.num_query_heads, a.num_kv_heads, a.head_dim)
    windows = {layer.attention.window for layer in config.layers}
    like = part.work.buffers.normed
    return all(attention_is_invariant(heads, window, most_keys, widths, like) for window in windows)


@torch.inference_mode()
def experts_are_invariant(part: Part) -> bool:
    """Whether products of experts and routers give a row the same bits wherever it lies.

    They have the same shape at all widths, so nothing else decides.
    """
    mixtures, config = part.work.mixtures, part.work.config
    if mixtures is None:
        return True
    part.work.operations.start()
    seen: set[Mixture] = set()
    for layer, kind in enumerate(config.layers):
        if not isinstance(kind.mlp, Mixture) or kind.mlp in seen:
            continue
        seen.add(kind.mlp)
        if not mixtures.keeps_bits(layer):
            return False
    return True


def products_of(part: Part) -> list[tuple[str, int]]:
    """Matrices that may be multiplied differently, and the row from which on.

    That is one for each size of matrix and each way in which its address is aligned.
    """
    found: dict[tuple[str, Hashable], str] = {}
    for names, layer in zip(part.model_pass.names, part.work.config.layers, strict=True):
        for short, name in names._asdict().items():
            if layer.common_mlp is None and short in OF_EXPERTS:
                continue
            _, behaviour = part.work.products.behaviour(name)
            found.setdefault((short, behaviour), name)
    products = [(name, 0) for name in found.values()]
    if part.work.streams.leaves_queries:
        products.append((part.model_pass.names[-1].qkv, part.model_pass.keys_at))
    return products


def multiply_as_a_pass(part: Part, name: str, first: int, x: Tensor) -> Tensor:
    """A product where passes have it: that may decide which kernel multiplies.

    All streams have the same factor, and their results [T, rows] come side by side.
    """
    work, (layer, product) = part.work, place_of(name)
    short = product.removeprefix("shared.")
    rows = part.communicator.rows(len(x))
    b = rows.buffers
    if short in OF_EXPERTS:
        mlp = work.config.layers[layer].common_mlp
        assert mlp is not None, "products of experts are tried elsewhere"
        b = b.of_layer(mlp.intermediate_size)
    if short == "attention_output":
        factor = x.repeat(1, work.streams.count)
    else:
        factor = (b.activated if short == "down" else b.normed).copy_(x)
    if short == "gate_up":
        activated = part.model_pass.activate(layer, rows.buffers)
        out = activated.values if isinstance(activated, Arranged) else activated
    elif product == "shared.down":
        assert work.mixtures is not None, "it lies beside experts"
        out = work.mixtures.beside[: len(x)]
        work.products.multiply(factor, name, out, first)
    else:
        out = b.qkv if short == "qkv" else part.communicator.output(int(short == "down"), rows)
        work.products.multiply(factor, name, out, first)
    return out[..., first:].movedim(-2, 0).flatten(1)


def _combined(behaviours: Sequence[Hashable | None]) -> Hashable | None:
    """What several operations do at one width, as one."""
    return None if None in behaviours else tuple(behaviours)
