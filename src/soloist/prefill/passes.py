"""One pass over the layers: what is computed for a chunk, and in which order.

On CUDA a layer of a rank that is alone is nine launches (four products, attention, four kernels of
ours), eight where gate_up and SwiGLU are one. One more brings earlier keys together where a library
attends and passes have settled widths, or merges splits where attention reads pages.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from soloist.model.config import Layer
from soloist.prefill.buffers import Buffers
from soloist.prefill.chunk_attention import ChunkAttention
from soloist.prefill.communicator import Communicator, Narrowing, Rows, Stages, Workspace
from soloist.prefill.elementwise import Chunk, Heads
from soloist.prefill.products import Arranged, Factor


class Names(NamedTuple):
    """Of one layer's matrices; gate_up and down are those of the MLP that all tokens take."""

    qkv: str
    attention_output: str
    gate_up: str
    down: str


class Pass:
    """A pass over one rank's part of a model.

    Args:
        work: what it computes with.
        attention: of its heads.
        communicator: what modules give goes there, and what they read comes from there.

    Attributes:
        names: of each layer.
    """

    def __init__(
        self, work: Workspace, attention: ChunkAttention, communicator: Communicator
    ) -> None:
        self._work, self._attention, self._communicator = work, attention, communicator
        self.names = [_names(i, layer) for i, layer in enumerate(work.config.layers)]

    def layers(self, chunk: Chunk, *, want_logits: bool) -> Iterator[Stages]:
        """The stages of each layer, the head's with the last one's; each to be run through."""
        rows = self._communicator.rows(chunk.num_rows)
        self._work.products.pads = not chunk.is_short_prompt
        self._work.operations.start()
        self._communicator.begin(rows, chunk)
        for layer in range(len(self.names)):
            yield self._layer(layer, rows, chunk, want_logits=want_logits)

    def _layer(self, layer: int, rows: Rows, chunk: Chunk, *, want_logits: bool) -> Stages:
        """Keys and values of all tokens; of the last layer more only for the last one."""
        communicator, products, names = self._communicator, self._work.products, self.names[layer]
        is_last = layer + 1 == len(self.names)
        narrowing = communicator.narrowing if is_last else None
        b, heads = rows.buffers, _heads(rows.buffers)
        yield from communicator.attention_input(layer, rows, chunk)
        # Where nobody reads the queries of all tokens they are not multiplied.
        first = self.keys_at if narrowing is Narrowing.QUERIES else 0
        products.multiply(products.factor(b.normed, names.qkv), names.qkv, b.qkv, first)
        self._work.operations.qkv_rope_store(b.qkv, layer, chunk, heads)
        if is_last and not want_logits:
            return
        output = names.attention_output
        arranged = self._attention.arranges and products.takes_arranged(output)
        if narrowing is Narrowing.QUERIES:
            rows = communicator.last_row(rows, chunk)
            b = rows.buffers
            products.multiply(products.factor(b.normed, names.qkv), names.qkv, b.qkv)
            own = _heads(b)
            self._work.operations.qkv_rope_store(b.qkv, layer, chunk.last_alone(), own)
            attended = self._attention.of_last(layer, chunk, own.queries, heads, arranged=arranged)
        else:
            attended = self._attention.of_all(layer, chunk, heads, arranged=arranged)
        yield from communicator.before_output(layer)
        if narrowing is Narrowing.OUTPUT:
            attended = attended.index_select(0, chunk.last)
            rows = communicator.last_row(rows, chunk)
        attended = self._with_room(output, attended)
        factor = Arranged(attended) if arranged else attended
        products.multiply(factor, output, communicator.output(2 * layer, rows))
        yield from communicator.mlp_input(layer, rows, chunk)
        if narrowing is Narrowing.MLP:
            rows = communicator.last_row(rows, chunk)
        self._mlp(layer, rows)
        yield from communicator.after_layer(layer, rows)
        if is_last:
            yield from communicator.head(rows, chunk)

    def _with_room(self, name: str, attended: Tensor) -> Tensor:
        """What attention gave, with more rows behind it in memory if its product takes them."""
        count = self._work.products.num_rows(name, len(attended))
        if count == len(attended):
            return attended
        assert self._work.attended is not None, "`Part.take_widths` made room"
        return self._work.attended[: len(attended)].copy_(attended)

    def _mlp(self, layer: int, rows: Rows) -> None:
        """What a layer's MLP gives, or its experts and what all tokens take beside them."""
        kind, mixtures, down = (
            self._work.config.layers[layer], self._work.mixtures, self.names[layer].down,
        )  # fmt: skip
        if kind.router is None:
            activated = self.activate(layer, rows.buffers)
            self._communicator.give_mlp(layer, rows, activated, down)
            return
        assert mixtures is not None, "some layer has experts"
        beside: Tensor | None = None
        if kind.common_mlp is not None:
            beside = mixtures.beside[: rows.num_rows]
            self._work.products.multiply(self.activate(layer, rows.buffers), down, beside)
        out = self._communicator.output(2 * layer + 1, rows)
        mixtures(layer, rows.buffers.normed, out, beside)

    @property
    def keys_at(self) -> int:
        """Rows of queries, after which keys begin."""
        return self._work.buffers.queries[0].numel()

    def activate(self, layer: int, b: Buffers) -> Factor:
        """`activated` of `normed`: gate_up and SwiGLU, as one kernel where there is one."""
        operations, products = self._work.operations, self._work.products
        mlp = self._work.config.layers[layer].common_mlp
        assert mlp is not None, "all tokens take an MLP"
        b = b.of_layer(mlp.intermediate_size)
        name, bias = self.names[layer].gate_up, operations.layers[layer].gate_up_bias
        factor = products.factor(b.normed, name)
        if bias is None and (activated := products.gated(factor, name, b.activated)) is not None:
            return activated
        if not products.in_rows:
            products.multiply(factor, name, b.gate_up)
            operations.silu_mul(b.gate_up, bias, b.activated)
            return b.activated
        matrix = products.matrix(name)
        x, product, out = products.lengthened(name, b.normed, b.gate_up, b.activated)
        if not operations.gate_up(x, matrix, bias, out):
            products.multiply_by(x, matrix, product)
            operations.silu_mul(b.gate_up, bias, b.activated)
        return b.activated


def _names(number: int, layer: Layer) -> Names:
    shared = "shared." if layer.router is not None and layer.common_mlp is not None else ""
    at = f"layers.{number}."
    return Names(
        f"{at}qkv", f"{at}attention_output", f"{at}{shared}gate_up", f"{at}{shared}down"
    )  # fmt: skip


def _heads(b: Buffers) -> Heads:
    return Heads(b.queries, b.keys, b.values)
