"""The residual stream: every block's rows of it, and how readers come to the whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from soloist.megakernel.interpreter.exchange import Exchange, Operand
from soloist.megakernel.interpreter.weights import Weights, rows_of
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan


class Stream:
    """The residual on its way to one kind of reader.

    Attributes:
        operand: its values, normed by an assumed scale.
        for_routers: the same times the weights of the norm before the MLP, where routers read it.
        squares: [query][block]: sum of squares, assumed scale.
        epoch: how often it has been published.
    """

    def __init__(self, plan: Plan, name: str, dtype: torch.dtype | None) -> None:
        self.operand = Operand(plan, f"hidden_{name}", dtype)
        # Of what routers read while attention is on its way.
        early = plan.routes_early and name == "in"
        self.for_routers = Operand(plan, "hidden_router", dtype) if early else None
        self.squares = Exchange(plan, f"squares_{name}")
        self.epoch = 0

    def read_for(self, op: Operation, queries: int) -> Tensor:
        """[k, 8] of the last epoch, for a matrix."""
        return self.operand.read_for(op, self.epoch, queries)

    def clear(self) -> None:
        """What the cleaner does while the last epoch is read."""
        self.operand.clear(self.epoch + 2)
        if self.for_routers is not None:
            self.for_routers.clear(self.epoch + 2)
        self.squares.clear(self.epoch + 2)


class Residual:
    """The stream in fp32, and by which scale each block expects that it is to be normed.

    Attributes:
        values: [blocks, queries, rows of a block].
        scale: [blocks, queries].
    """

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self._plan, self._weights = plan, weights
        self._embedding_scale = weights.embedding_scale()
        self.values = torch.full((plan.blocks, MAX_QUERIES, plan.shared.hidden_rows), torch.nan)
        self.scale = torch.zeros(plan.blocks, MAX_QUERIES)

    def rows(self, block: int) -> range:
        """The rows of a block, those of its part of `down` in every layer."""
        return rows_of(self._plan.image.operation(0, "down"), block)

    def part(self, block: int, queries: int) -> Tensor:
        """[queries, rows] of a block, to be changed in place."""
        return self.values[block, :queries, : len(self.rows(block))]

    def embed(self, tokens: Sequence[int]) -> None:
        """Begin a round."""
        for block in range(self._plan.blocks):
            rows, part = self.rows(block), self.part(block, len(tokens))
            for c, token in enumerate(tokens):
                part[c] = self._weights.embedding(token, rows)
        self.scale[:, : len(tokens)] = self._embedding_scale

    def add(self, op: Operation, product: Tensor, layer: int, block: int) -> None:
        """A product [rows, columns] with its bias."""
        rows = rows_of(op, block)
        assert rows == self.rows(block), "the residual's rows stay where they are"
        bias = self._weights.vector(layer, f"{op.matrix.name}_bias", rows)
        part = self.part(block, product.shape[1])
        part += (product + bias[:, None]).T

    def publish(self, stream: Stream, queries: int, layer: int, norm: str) -> None:
        """All blocks' rows as the stream's next epoch, times the weights of a norm."""
        stream.epoch += 1
        for block in range(self._plan.blocks):
            rows, x = self.rows(block), self.part(block, queries)
            scale = self.scale[block, :queries]
            scaled = x * self._weights.vector(layer, norm, rows) * scale[:, None]
            stream.operand.publish(stream.epoch, range(queries), rows, scaled)
            if stream.for_routers is not None:
                norms = self._weights.vector(layer % self._plan.model.num_layers, "mlp_norm", rows)
                of_routers = x * norms * scale[:, None]
                stream.for_routers.publish(stream.epoch, range(queries), rows, of_routers)
            squares = torch.stack([x.square().sum(1), scale], dim=1)
            stream.squares.write(stream.epoch, (slice(queries), block), squares)

    def factor(self, stream: Stream, block: int, queries: int) -> Tensor:
        """[queries]: true scale over the assumed one; the true one is assumed from now on."""
        squares, assumed = stream.squares.read(stream.epoch, (slice(queries),)).unbind(2)
        assert (assumed == assumed[:, :1]).all(), "blocks assume different scales"
        mean = squares.sum(1) / self._plan.model.hidden_size
        self.scale[block, :queries] = (mean + self._plan.model.norm_epsilon).rsqrt()
        return self.scale[block, :queries] / assumed[:, 0]
