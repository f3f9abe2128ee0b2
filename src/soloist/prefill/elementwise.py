"""What prefill does between matrix products, in plain torch, which kernels have to match.

The residual stream is fp32, and so is everything inside one operation; its result is rounded once.
Products come in whatever dtype the library multiplied into.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it that
from torch import Tensor

from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.rope import Rope
from soloist.prefill.attention import attend
from soloist.prefill.fragments import arranged_columns
from soloist.reference.blocks import Rotary

Vectors = Mapping[str, Tensor]
# What plans call the dtypes that kernels run in.
DTYPES = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """One layer's fp32 norm weights and biases; None where the layer has none.

    Attributes:
        router: [E, H], of a mixture of experts.
        router_correction: [E], of one whose scores are corrected.
        shared_gate: [1, H], of one with a gate for the MLP beside its experts.
    """

    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None
    attention_output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    router: Tensor | None = None
    router_correction: Tensor | None = None
    shared_gate: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        position: of the first token.
        num_tokens: tokens; rows from here on are padding, computed but not stored in the pool.
        ids: [rows] int32.
        place: [2] int32, `position` and `num_tokens` once more: a captured graph reads them there.
        last: [1] int32, the row whose logits are wanted.
        page_table: [pages] int32; numbers behind the last page of these tokens are of no prompt.
        last_place: [2] int32, the last token as a chunk of its own that is not stored.
        last_ends: [4] int32, that query and its keys: (0, 1), (0, `stop`).
        query_bounds: [2] int32, all queries: (0, `num_tokens`).
        is_short_prompt: all of a prompt that is shorter than any chunk, where passes have
            batch-invariant widths. Nothing of it is kept, so its rows may have bits of their own.
    """

    position: int
    num_tokens: int
    ids: Tensor
    place: Tensor
    last: Tensor
    page_table: Tensor
    last_place: Tensor
    last_ends: Tensor
    query_bounds: Tensor
    is_short_prompt: bool = False

    def last_alone(self) -> "Chunk":
        """The last token, not to be stored again."""
        return replace(
            self,
            position=self.position + self.num_tokens - 1,
            num_tokens=0,
            ids=self.ids[:1],
            place=self.last_place,
        )

    @property
    def num_rows(self) -> int:
        """Tokens and padding."""
        return self.ids.shape[0]

    @property
    def key_bounds(self) -> Tensor:
        """[2] int32, all keys: (0, `stop`)."""
        return self.last_ends[2:]

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.position + self.num_tokens


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries [T, Q, D], keys and values [T, K, D] of a chunk, ready for attention."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Delta(NamedTuple):
    """What joins the residual stream: a product [T, H], and its bias [H] if it has one.

    The last of several may be parts of sums [parts, T, H], as of `Products.multiply_in_parts`.
    """

    product: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Reach:
    """What ranks read and write of each other, each list by rank.

    Attributes:
        parts: [T, H] products, which are summed over ranks; of lanes see `LaneOperations`.
        results: [T, H], what the next product reads.
    """

    parts: Sequence[Tensor]
    results: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of a chunk whose residual stream a rank has.

    Attributes:
        rows: of the chunk.
        residual: [rows, H] fp32.
        last: [1] int32, the row of the chunk that the only row of `parts` and `normed` stands for;
            None where those have all of the chunk's rows.
    """

    rows: range
    residual: Tensor
    last: Tensor | None = None


class Elementwise(ABC):
    """Everything of prefill but matrix products and attention, of which it may have faster ones.

    Args:
        config: what the rank has; layers have the same heads, and rope turns their halves.
        vectors: fp32 norm weights, biases and routers, by the name of their `TensorSpec`.
        pool: gains keys and values.
        rope: cosine and sine of at least all positions in use, as from `rope_table`; None makes it.
    """

    capturable = False

    def __init__(
        self, config: ModelConfig, vectors: Vectors, pool: PagePool, rope: Tensor | None = None
    ) -> None:
        self.config, self.pool = config, pool
        self.layers = [_layer_vectors(config, vectors, i) for i in range(config.num_layers)]
        self.final_norm = vectors["final_norm"]
        if rope is None:
            positions = min(config.context_tokens, pool.num_pages * PAGE_POSITIONS)
            rope = rope_table(config.rope, pool.head_dim, positions, pool.device)
        self.rope_table = rope

    def start(self) -> None:  # noqa: B027 - most need no notice
        """A pass over the model begins, in torch's current stream."""

    @abstractmethod
    def embed(self, table: Tensor, chunk: Chunk, residual: Tensor) -> None:
        """`residual` [T, H] = rows of `table` [V, H]."""

    @abstractmethod
    def add_norm(
        self,
        residual: Tensor,
        deltas: Sequence[Delta],
        weight: Tensor,
        out: Tensor,
        *,
        keeps: bool = True,
        arranged: bool = False,
    ) -> None:
        """`residual` [T, H] += up to two `deltas`; `out` = its RMS norm times `weight`.

        Columns that are `arranged` are in the order of `Products.takes_arranged`. Unless it `keeps`
        the sum, `residual` stays as it is: the next call adds the same again, which moves fewer
        bytes than writing the sum and reading it.
        """

    def tell(self, reach: Reach) -> None:  # noqa: B027 - where one queue has everything in order
        """Tell all ranks that this one's parts are there."""

    def meet(self, reach: Reach) -> None:  # noqa: B027 - the same
        """Wait until all ranks' norms are there."""

    @abstractmethod
    def sum_norm(
        self, reach: Reach, own: OwnRows, bias: Tensor | None, weight: Tensor, *, has_parts: bool
    ) -> None:
        """`own.residual` += all ranks' parts, in their order, + `bias`; its norm to all ranks.

        After all ranks' `tell`. Without `has_parts` only the norm.
        """

    @abstractmethod
    def qkv_rope_store(self, product: Tensor, layer: int, chunk: Chunk, heads: Heads) -> None:
        """Bias, query and key norm, rope: `product` [T, (Q + 2 K) D] to `heads` and the pool.

        Of l streams `product` may be [l, T, …], with Q / l and K / l heads of each.
        """

    @abstractmethod
    def gather(self, layer: int, chunk: Chunk, keys: Tensor, values: Tensor) -> None:
        """A layer's keys and values from the pool, the chunk's own included, each at its position.

        Args:
            layer: which one; of a windowed one only blocks of positions that the chunk sees.
            chunk: with `qkv_rope_store` done.
            keys: [S, K, D], S at least `chunk.stop`.
            values: the same.
        """

    def store(self, layer: int, chunk: Chunk, heads: Heads) -> None:
        """Keys and values of the chunk's tokens to the pool; `heads` have what it then holds.

        What attention sees was rounded before, in this chunk too: so no bit depends on how a prompt
        was cut.
        """
        if not chunk.num_tokens:
            return
        stored = slice(chunk.num_tokens)
        self.pool.write(
            layer, chunk.page_table, chunk.position, heads.keys[stored], heads.values[stored]
        )
        if not self.pool.layout.format.is_plain:
            for x in (heads.keys, heads.values):
                x.copy_(self.pool.rounded(x))

    def read(self, layer: int, chunk: Chunk, keys: Tensor, values: Tensor) -> None:
        """`gather` in plain torch."""
        window = self.config.layers[layer].attention.window
        start = 0 if window is None else max(0, chunk.position + 1 - window)
        start -= start % LEAST_CHUNK_TOKENS
        if chunk.num_tokens:
            read = self.pool.read(layer, chunk.page_table, start, chunk.stop)
            for gathered, part in zip((keys, values), read, strict=True):
                gathered[start : chunk.stop] = part.transpose(0, 1)

    @abstractmethod
    def silu_mul(self, product: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """`product` [..., 2 F] (+ `bias`), gate then up, to silu(gate) · up [..., F]."""

    def gate_up(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> bool:  # noqa: ARG002 - most have no such kernel
        """The product of `x` [T, H] with gate_up's matrix [2 F, H] and `silu_mul` at once.

        Returns:
            Whether that was done: only where a kernel is faster than the two.
        """
        return False

    @property
    def attends(self) -> bool:
        """Whether `attend` is a kernel of ours, which is faster than any library."""
        return False

    def attend(self, heads: Heads, window: int | None) -> Tensor:
        """What a chunk that begins its sequence attends to, [T, Q · D]; `window` as of libraries.

        Where it `attends`, a row's bits depend neither on T nor on what other rows hold.
        """
        return attend(heads.queries, heads.keys, heads.values, window)

    @property
    def attends_pages(self) -> bool:
        """Whether `attend_pages` is there, whose bits do not depend on how a prompt is cut."""
        return False

    def attend_pages(
        self,
        layer: int,
        chunk: Chunk,
        queries: Tensor,
        query_bounds: Tensor,
        *,
        arranged: bool = False,
    ) -> Tensor:
        """What a sequence's last queries attend to, [rows, Q · D], with keys and values in pages.

        Args:
            layer: which one.
            chunk: with `qkv_rope_store` done.
            queries: [rows, Q, D]; what comes out for those behind the last one is undefined.
            query_bounds: [2] int32, 0 and the number of queries.
            arranged: columns are in the order of `Products.takes_arranged`.
        """
        raise NotImplementedError("where it `attends_pages`")


MakeElementwise = Callable[[ModelConfig, Vectors, PagePool], Elementwise]


class TorchElementwise(Elementwise):
    """On any device."""

    def embed(self, table: Tensor, chunk: Chunk, residual: Tensor) -> None:
        """See the base class."""
        residual.copy_(table.index_select(0, chunk.ids))

    def add_norm(
        self,
        residual: Tensor,
        deltas: Sequence[Delta],
        weight: Tensor,
        out: Tensor,
        *,
        keeps: bool = True,
        arranged: bool = False,
    ) -> None:
        """See the base class."""
        total = residual
        for delta in deltas:
            product = delta.product
            if product.ndim > residual.ndim:
                product = product.sum(0)
            total = total + _biased(product, delta.bias)
        if keeps:
            residual.copy_(total)
        norm = rms_norm(total, weight, self.config.norm_epsilon)
        out.copy_(norm[:, arranged_columns(norm.shape[1])] if arranged else norm)

    def sum_norm(
        self, reach: Reach, own: OwnRows, bias: Tensor | None, weight: Tensor, *, has_parts: bool
    ) -> None:
        """See the base class."""
        device, rows, residual = own.residual.device, own.rows, own.residual
        if own.last is not None:
            row = int(own.last)
            if row not in rows:
                return
            residual, rows = residual[row - rows.start :][:1], range(1)
        here = slice(rows.start, rows.stop)
        if has_parts:
            first, *others = (part[here].to(device, torch.float32) for part in reach.parts)
            residual.add_(_biased(sum(others, first), bias))
        norm = rms_norm(residual, weight, self.config.norm_epsilon)
        for result in reach.results:
            result[here] = norm

    def qkv_rope_store(self, product: Tensor, layer: int, chunk: Chunk, heads: Heads) -> None:
        """See the base class."""
        vectors, attention = self.layers[layer], self.config.layers[layer].attention
        q, k, dim = attention.num_query_heads, attention.num_kv_heads, attention.head_dim
        exact = _biased(product, vectors.qkv_bias)
        exact = exact.view(-1, chunk.num_rows, exact.shape[-1] // dim, dim)  # [l, T, heads, D]
        counts = [n // len(exact) for n in (q, k, k)]
        queries, keys, values = (
            part.transpose(0, 1).flatten(1, 2) for part in torch.split(exact, counts, 2)
        )
        if vectors.q_norm is not None and vectors.k_norm is not None:
            queries = rms_norm(queries, vectors.q_norm, self.config.norm_epsilon)
            keys = rms_norm(keys, vectors.k_norm, self.config.norm_epsilon)
        if attention.rope:
            rows = torch.arange(chunk.num_rows, device=product.device) + chunk.position
            rotations = self.rope_table[rows.clamp_(max=len(self.rope_table) - 1)]
            queries, keys = _rotated(queries, rotations), _rotated(keys, rotations)
        for exact, rounded in (
            (queries, heads.queries), (keys, heads.keys), (values, heads.values)
        ):  # fmt: skip
            rounded.copy_(exact)
        self.store(layer, chunk, heads)

    def gather(self, layer: int, chunk: Chunk, keys: Tensor, values: Tensor) -> None:
        """See the base class."""
        self.read(layer, chunk, keys, values)

    def silu_mul(self, product: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See the base class."""
        gate, up = _biased(product, bias).chunk(2, -1)
        out.copy_(F.silu(gate) * up)


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Cosine and sine of every angle as the reference has them: [positions, D / 2, 2] fp32.

    Where a share of a head rotates, the pairs behind it have an angle of 0.
    """
    rotary = Rotary(rope, head_dim, positions, device)
    table = torch.stack([rotary.cos[:, 0, 0], rotary.sin[:, 0]], -1)
    still = torch.tensor([1.0, 0.0], device=device)
    still = still.expand(positions, head_dim // 2 - table.shape[1], 2)
    return torch.cat([table, still], 1)


def widest(pool: PagePool) -> torch.dtype:
    """Of products: only CUDA multiplies 16-bit matrices into fp32."""
    return torch.float32 if pool.device.type == "cuda" else pool.dtype


def _biased(product: Tensor, bias: Tensor | None) -> Tensor:
    return product.float() if bias is None else product.float() + bias


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Divide by the root mean square of the last dimension, times `weight`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _rotated(heads: Tensor, rotations: Tensor) -> Tensor:
    """Heads [T, heads, D] with pairs (d, d + D / 2) turned by [T, D / 2, 2]."""
    first, second = heads.chunk(2, -1)
    cos, sin = rotations[:, None, :, 0], rotations[:, None, :, 1]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _layer_vectors(config: ModelConfig, vectors: Vectors, layer: int) -> LayerVectors:
    attention, mlp = config.layers[layer].attention, config.layers[layer].each_mlp
    router = config.layers[layer].router

    def own(name: str, *, there: bool) -> Tensor | None:
        return vectors[f"layers.{layer}.{name}"] if there else None

    return LayerVectors(
        attention_norm=vectors[f"layers.{layer}.attention_norm"],
        mlp_norm=vectors[f"layers.{layer}.mlp_norm"],
        q_norm=own("q_norm", there=attention.qk_norm),
        k_norm=own("k_norm", there=attention.qk_norm),
        qkv_bias=own("qkv_bias", there=attention.qkv_bias),
        attention_output_bias=own("attention_output_bias", there=attention.output_bias),
        gate_up_bias=own("gate_up_bias", there=mlp.bias),
        down_bias=own("down_bias", there=mlp.bias),
        router=own("router", there=router is not None),
        router_correction=own(
            "router_correction", there=router is not None and router.is_corrected
        ),
        shared_gate=own("shared_gate", there=config.layers[layer].gates_shared),
    )
