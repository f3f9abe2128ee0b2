"""Attention and MLP as the definition of the maths: one block in, its own contribution out.

A block takes the normalised stream [T, H] and returns what it adds to the residual stream; who adds
it, and when, is the transformer's business. The residual stream, norms, rope and softmax are fp32;
matrices multiply in the model's dtype. Results live in scratch that the next block reuses, and
views of it are made once per number of tokens: at one token a step, making views is half the work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it that
from torch import Tensor

from soloist.model.config import Activation, Attention, Mlp
from soloist.model.rope import Rope
from soloist.reference import huge_pages
from soloist.reference.cache import KVCache, Scratch
from soloist.reference.memory import MOST_READERS, SCORE_VALUES

# Weights that are widened to fp32 at a time: 2 MB.
WIDENED_VALUES = 2**19
# Activations of torch with no more values have one thread: each thread wants at least as many.
_ONE_THREADS_VALUES = 2**14


class Pairs(NamedTuple):
    """Heads [T, heads, D] as rotated pairs: element i of `first` and `second` turn together."""

    both: Tensor  # [T, heads, 2, R / 2]
    first: Tensor  # [T, heads, R / 2]
    second: Tensor  # [T, heads, R / 2]
    rest: Tensor | None  # [T, heads, D - R], what does not rotate


class Rotary:
    """Cosine and sine of every angle up to some position, fp32.

    Attributes:
        cos: [positions, 1, 1, R / 2].
        sin: [positions, 1, R / 2].
    """

    def __init__(self, rope: Rope, head_dim: int, positions: int, device: torch.device) -> None:
        frequencies = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        self.cos = (angles.cos() * rope.attention_factor).to(device)[:, None, None]
        self.sin = (angles.sin() * rope.attention_factor).to(device)[:, None]
        self._interleaved, self._dims = rope.interleaved, rope.rotated_dims(head_dim)

    def pairs(self, heads: Tensor) -> Pairs:
        """Which elements of heads [T, heads, D] rotate together."""
        tokens, count, dim = heads.shape
        rest = None
        if self._dims < dim:
            heads, rest = heads[..., : self._dims], heads[..., self._dims :]
        if self._interleaved:
            both = heads.view(tokens, count, self._dims // 2, 2).transpose(2, 3)
        else:
            both = heads.view(tokens, count, 2, self._dims // 2)
        return Pairs(both, both[:, :, 0], both[:, :, 1], rest)


@dataclass(slots=True)
class Step:
    """What all blocks share in one pass over T consecutive positions of one sequence.

    Attributes:
        position: of the first token.
        num_tokens: T.
        rotaries: a rope table for each of the model's `ropes`.
        cache: keys and values before and, after the blocks ran, of these positions.
        scratch: buffers for intermediate results of the block that runs.
        by_rows: give every token the bits of a step of its own: each row is multiplied by itself,
            and attends to the keys that it sees. The other operations do not mix rows
            (`rows_keep_bits`).
    """

    position: int
    num_tokens: int
    rotaries: Sequence[Rotary]
    cache: KVCache
    scratch: Scratch
    by_rows: bool = False
    # Of each table cos [T, 1, 1, R / 2] and sin [T, 1, R / 2].
    _angles: list[tuple[Tensor, Tensor]] = field(init=False)
    _masks: dict[int | None, tuple[int, Tensor]] = field(default_factory=dict)
    _scores: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = slice(self.position, self.position + self.num_tokens)
        self._angles = [(rotary.cos[rows], rotary.sin[rows]) for rotary in self.rotaries]

    def use(self, scratch: Scratch) -> None:
        """Keep intermediate results there from now on; those of earlier blocks are not needed."""
        if scratch is not self.scratch:
            self.scratch = scratch
            self._scores.clear()

    def rotate(self, source: Pairs, target: Pairs, rope: int) -> None:
        """Turn every pair by its position's angle: (a, b) → (a cos - b sin, b cos + a sin).

        Args:
            source: heads.
            target: the same rotated.
            rope: which of the model's.
        """
        cos, sin = self._angles[rope]
        torch.mul(source.both, cos, out=target.both)
        target.first.addcmul_(source.second, sin, value=-1)
        target.second.addcmul_(source.first, sin)
        if source.rest is not None and target.rest is not None:
            target.rest.copy_(source.rest)

    def scores(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], num_query_heads: int
    ) -> Tensor:
        """A tensor for attention scores, out of an allocation made for the whole context."""
        key = (name, dtype, shape)
        if key not in self._scores:
            most = max(num_query_heads * self.cache.capacity, SCORE_VALUES // MOST_READERS)
            self._scores[key] = self.scratch.take_growing(name, dtype, shape, most)
        return self._scores[key]

    def first_key(self, window: int | None, row: int = 0) -> int:
        """The earliest key that any of these tokens sees, from the token `row` on."""
        return 0 if window is None else max(0, self.position + row + 1 - window)

    def mask(self, window: int | None, device: torch.device) -> tuple[int, Tensor] | None:
        """Which keys are hidden from which tokens; None if every token sees all.

        Returns:
            The position of the first key that is hidden from any token, and from there on
            [T, keys] fp32: 0 where a token sees a key, minus infinity where not.
        """
        if self.num_tokens == 1 or self.by_rows:
            return None
        if window not in self._masks:
            stop = self.position + self.num_tokens
            start = self.position if window is None else self.first_key(window)
            tokens = torch.arange(self.position, stop, device=device)[:, None]
            keys = torch.arange(start, stop, device=device)[None]
            hidden = keys > tokens
            if window is not None:
                hidden |= keys <= tokens - window
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = (start, mask)
        return self._masks[window]


def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
    """X / sqrt(mean(x²) + epsilon) · weight over the last dimension, in fp32, rounded into `out`.

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    scale = scratch.take("norm_scale", torch.float32, *x.shape[:-1], 1)
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=scale)
    torch.addcmul(epsilon, scale, scale, value=1 / x.shape[-1], out=scale).rsqrt_()
    exact = out if out.dtype is torch.float32 else scratch.take("normed", torch.float32, *x.shape)
    torch.mul(x, scale, out=exact)
    return torch.mul(exact, weight, out=out)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, by_rows: bool = False
) -> Tensor:
    """X [T, in] · weight [in, out] + bias; `by_rows` with the bits of each row's own product.

    Libraries multiply several rows in another order than one, and one row in another order where it
    does not begin at a multiple of 64 bytes. A matrix that stays in a cache from row to row still
    costs less than as many steps.
    """
    if by_rows:
        for row, row_out in zip(torch.split(x, 1), torch.split(out, 1), strict=True):
            if _is_aligned(row) and _is_aligned(row_out):
                linear(row, weight, None, row_out)
            else:  # a new tensor is
                row_out.copy_(linear(row.clone(), weight, None, torch.empty_like(row_out)))
    elif is_quick(weight):
        torch.mm(x, weight, out=out)
    else:
        _widened_product(x, weight, out)
    return out if bias is None else out.add_(bias)


def _is_aligned(row: Tensor) -> bool:
    return row.data_ptr() % 64 == 0


def is_quick(weight: Tensor) -> bool:
    """Whether torch multiplies such matrices as quickly as their bytes allow."""
    return weight.dtype is torch.float32 or not weight.is_cpu or _is_quick_on_cpu(weight.dtype)


@cache
def _is_quick_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU's library has products in 16 bits; torch's own are hundreds of times slower.

    So is fp16 on most CPUs, and bf16 on those without AVX-512.
    """
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return asked is not None and bool(asked())


def _widened_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The product in fp32 of 16-bit weights, some columns at a time: they stay in a cache."""
    wide, columns = x.float(), max(64, WIDENED_VALUES // weight.shape[0])
    for first in range(0, weight.shape[1], columns):
        part = slice(first, first + columns)
        out[:, part] = torch.mm(wide, weight[:, part].float())


def by_columns(weight: Tensor) -> Tensor:
    """[..., out, in] as [..., in, out]; on a CPU stored so, which a row streams a sixth faster."""
    if weight.device.type != "cpu":
        return weight.mT
    return huge_pages.empty(weight.mT.shape, weight.dtype).copy_(weight.mT)


class AttentionBuffers:
    """Where a block's intermediate results for T tokens live, and the views it works through."""

    def __init__(
        self, a: Attention, hidden: int, tokens: int, dtype: torch.dtype, step: Step, rope: int
    ) -> None:
        take, fp32 = step.scratch.take, torch.float32
        groups, group, dim = a.num_kv_heads, a.queries_per_kv_head, a.head_dim
        rotating = a.num_query_heads + a.num_kv_heads
        self.fused = take("qkv", dtype, tokens, a.qkv_rows)
        heads = self.fused.view(tokens, -1, dim)
        self.raw = heads[:, :rotating]  # [T, Q + K, D]
        self.values = heads[:, rotating:].transpose(0, 1)  # [K, T, D]
        final = self.raw
        if a.qk_norm or a.rope:
            final = self.exact = take("qk", fp32, tokens, rotating, dim)
        self.norms: list[tuple[Tensor, Tensor]] = []  # what is normed, and where to
        if a.qk_norm:
            final = take("qk_normed", fp32, tokens, rotating, dim)
            counts = [a.num_query_heads, a.num_kv_heads] if a.qk_norm_joins_heads else [rotating]
            split = zip(*(torch.split(x, counts, 1) for x in (self.exact, final)), strict=True)
            self.norms = [
                (x.view(tokens, -1), out.view(tokens, -1)) if a.qk_norm_joins_heads else (x, out)
                for x, out in split
            ]
        if a.rope:
            self.before = step.rotaries[rope].pairs(final)
            final = take("qk_rotated", fp32, tokens, rotating, dim)
            self.after = step.rotaries[rope].pairs(final)
        self.queries = final[:, : a.num_query_heads].view(tokens, groups, group, dim)
        self.keys = final[:, a.num_query_heads :].transpose(0, 1)  # [K, T, D]
        self.mixed = take("mixed_by_token", dtype, tokens, a.num_query_heads * dim)
        self.mixed_heads = self.mixed.view(tokens, groups, group, dim)
        self.out = take("attention_out", dtype, tokens, hidden)


class AttentionBlock:
    """Grouped-query attention with optional biases, query and key norms, rope and window."""

    def __init__(
        self,
        attention: Attention,
        weights: Mapping[str, Tensor],
        norm_epsilon: Tensor,
        cache_index: int,
        rope: int = 0,
        norm_offset: float = 0.0,
    ) -> None:
        self.attention = attention
        self._qkv = by_columns(weights["qkv"])
        self._qkv_bias = weights.get("qkv_bias")
        self._output = by_columns(weights["attention_output"])
        self._output_bias = weights.get("attention_output_bias")
        self._qk_norms = _qk_norms(attention, weights, norm_offset) if attention.qk_norm else []
        self._rope = rope
        self._epsilon = norm_epsilon
        self._cache_index = cache_index
        self._buffers_key = repr(attention)

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        """[T, H] → [T, H]; appends the keys and values of these positions to the cache."""
        b = step.scratch.made(
            (self._buffers_key, step.num_tokens, h.dtype),
            lambda: AttentionBuffers(
                self.attention, h.shape[1], step.num_tokens, h.dtype, step, self._rope
            ),
        )
        linear(h, self._qkv, self._qkv_bias, b.fused, by_rows=step.by_rows)
        if self._qk_norms or self.attention.rope:
            b.exact.copy_(b.raw)
        for (x, out), weight in zip(b.norms, self._qk_norms, strict=True):
            rms_norm(x, weight, self._epsilon, out, step.scratch)
        if self.attention.rope:
            step.rotate(b.before, b.after, self._rope)
        step.cache.append(self._cache_index, step.position, b.keys, b.values)
        self._attend(b, step)
        return linear(b.mixed, self._output, self._output_bias, b.out, by_rows=step.by_rows)

    def _attend(self, b: AttentionBuffers, step: Step) -> None:
        """softmax(q kᵀ · scale) v of all tokens, some at a time, into `b.mixed`.

        The queries that share a KV head are rows of one matrix product: [K, Q / K · t, D].
        """
        a, tokens, dtype = self.attention, step.num_tokens, b.mixed.dtype
        if (tokens == 1 or step.by_rows) and b.queries.dtype is dtype:
            for i in range(tokens):
                self._attend_rows(b.queries[i], b.mixed_heads[i], slice(i, i + 1), step)
            return
        num_keys = step.position + tokens - step.first_key(a.window)
        most = SCORE_VALUES // MOST_READERS
        tile = max(1, min(tokens, most // (a.num_query_heads * num_keys)))
        tile = 1 if step.by_rows else tile
        for first in range(0, tokens, tile):
            part = slice(first, min(first + tile, tokens))
            queries, mixed = b.queries[part], b.mixed_heads[part]
            count, groups, group, dim = queries.shape
            rows = step.scratch.take("queries", dtype, groups, group, count, dim)
            rows.copy_(queries.permute(1, 2, 0, 3))
            out = step.scratch.take("mixed", dtype, groups, group, count, dim)
            by_group = (groups, group * count, dim)
            self._attend_rows(rows.view(by_group), out.view(by_group), part, step)
            mixed.copy_(out.permute(2, 0, 1, 3))

    def _attend_rows(self, rows: Tensor, out: Tensor, part: slice, step: Step) -> None:
        """Attention of query rows [K, Q / K · t, D] of the tokens `part` of this step."""
        window, heads, dtype = self.attention.window, self.attention.num_query_heads, out.dtype
        if step.by_rows:  # of one token, which sees nothing behind itself
            start, stop = step.first_key(window, part.start), step.position + part.stop
        else:
            start, stop = step.first_key(window), step.position + step.num_tokens
        keys, values = step.cache.view(self._cache_index, start, stop)
        shape = (rows.shape[0], rows.shape[1], stop - start)
        scores = step.scores("scores", dtype, shape, heads)
        scale = self.attention.scale
        if is_quick(keys):
            torch.baddbmm(scores, rows, keys.mT, beta=0, alpha=scale, out=scores)
        else:
            scores.copy_(torch.bmm(rows.float(), keys.float().mT).mul_(scale))
        masked = step.mask(window, scores.device)
        if masked is not None:
            first_hidden, mask = masked
            by_token = scores.view(-1, part.stop - part.start, stop - start)
            by_token[:, :, first_hidden - start :].add_(mask[part])
        exact = step.scores("shares", torch.float32, shape, heads)
        shares = torch.softmax(scores, -1, dtype=torch.float32, out=exact)
        if not is_quick(values):
            out.copy_(torch.bmm(shares, values.float()))
            return
        if dtype is not torch.float32:
            shares = scores.copy_(shares)
        torch.bmm(shares, values, out=out)


class MlpBuffers:
    """Where an MLP's intermediate results for T tokens live."""

    def __init__(
        self, ffn: int, hidden: int, tokens: int, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        self.gate_up = scratch.take("gate_up", dtype, tokens, 2 * ffn)
        self.gate, self.up = self.gate_up[:, :ffn], self.gate_up[:, ffn:]
        self.out = scratch.take("mlp_out", dtype, tokens, hidden)


class MlpBlock:
    """down(activation(gate(x)) · up(x)). Source: Shazeer, arXiv 2002.05202."""

    def __init__(self, mlp: Mlp, weights: Mapping[str, Tensor]) -> None:
        self.mlp = mlp
        self._gate_up = by_columns(weights["gate_up"])
        self._gate_up_bias = weights.get("gate_up_bias")
        self._down = by_columns(weights["down"])
        self._down_bias = weights.get("down_bias")

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        """[T, H] → [T, H]; any rows, also others than the step's tokens."""
        tokens, ffn = h.shape[0], self.mlp.intermediate_size
        b = step.scratch.made(
            ("mlp", ffn, tokens, h.dtype),
            lambda: MlpBuffers(ffn, h.shape[1], tokens, h.dtype, step.scratch),
        )
        linear(h, self._gate_up, self._gate_up_bias, b.gate_up, by_rows=step.by_rows)
        activate(b.gate, self.mlp.activation)
        b.gate.mul_(b.up)
        return linear(b.gate, self._down, self._down_bias, b.out, by_rows=step.by_rows)


def activate(gate: Tensor, activation: Activation) -> None:
    """The activation function of values [T, F], in their place.

    torch cuts values between threads wherever the numbers come out even, and the last few of each
    part have other bits than they have inside. So it is given what it leaves to one thread.
    """
    if gate.numel() > _ONE_THREADS_VALUES:
        rows = _ONE_THREADS_VALUES // gate.shape[1]
        size, dim = (rows, 0) if rows else (_ONE_THREADS_VALUES, 1)
        for part in torch.split(gate, size, dim):
            activate(part, activation)
    elif activation == "silu":
        F.silu(gate, inplace=True)
    else:  # Hendrycks and Gimpel, arXiv 1606.08415, section 2
        gate.copy_(F.gelu(gate, approximate="tanh"))


def norm_scales(weight: Tensor, offset: float) -> Tensor:
    """What an RMS norm multiplies by: the stored scales and what was taken off them, fp32."""
    return weight.float() + offset if offset else weight.float()


def _qk_norms(a: Attention, weights: Mapping[str, Tensor], offset: float) -> list[Tensor]:
    """Scales of queries [Q · D] and of keys [K · D]; or of all their heads, as one [Q + K, D]."""
    queries, keys = (norm_scales(weights[name], offset) for name in ("q_norm", "k_norm"))
    if a.qk_norm_joins_heads:
        return [queries, keys]
    return [torch.cat([queries.expand(a.num_query_heads, -1), keys.expand(a.num_kv_heads, -1)])]
