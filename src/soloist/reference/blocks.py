"""Attention and MLP as the definition of the maths: one block in, its own contribution out.

A block takes the normalised stream [T, H] and returns what it adds to the residual stream; who adds
it, and when, is the transformer's business. The residual stream, norms, rope and softmax are fp32;
matrices multiply in the model's dtype. Results live in scratch that the next block reuses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soloist.model.config import Attention, Mlp
from soloist.model.memory import SCORE_VALUES
from soloist.model.rope import Rope
from soloist.reference.cache import KVCache, Scratch


class Rotary:
    """Cosine and sine of every angle up to some position, [positions, D / 2] fp32."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, device: torch.device) -> None:
        frequencies = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        self.cos = (angles.cos() * rope.attention_factor).to(device)
        self.sin = (angles.sin() * rope.attention_factor).to(device)
        self._interleaved = rope.interleaved

    def rotate(self, heads: Tensor, position: int, out: Tensor) -> Tensor:
        """Rotate heads [T, heads, D] of consecutive positions into `out`."""
        rows = slice(position, position + heads.shape[0])
        cos, sin = self.cos[rows, None, None], self.sin[rows, None]
        source, target = self._pairs(heads), self._pairs(out)
        torch.mul(source, cos, out=target)
        target[:, :, 0].addcmul_(source[:, :, 1], sin, value=-1)
        target[:, :, 1].addcmul_(source[:, :, 0], sin)
        return out

    def _pairs(self, heads: Tensor) -> Tensor:
        """[T, heads, 2, D / 2]: element i of both rows is one rotated pair."""
        tokens, count, dim = heads.shape
        if self._interleaved:
            return heads.view(tokens, count, dim // 2, 2).transpose(2, 3)
        return heads.view(tokens, count, 2, dim // 2)


@dataclass(slots=True)
class Step:
    """What all blocks share in one pass over T consecutive positions of one sequence.

    Attributes:
        position: of the first token.
        num_tokens: T.
        rotary: the rope table.
        cache: keys and values before and, after the blocks ran, of these positions.
        scratch: buffers for intermediate results.
    """

    position: int
    num_tokens: int
    rotary: Rotary
    cache: KVCache
    scratch: Scratch
    _masks: dict[int | None, tuple[int, Tensor]] = field(default_factory=dict)

    def first_key(self, window: int | None) -> int:
        """The earliest key that any of these tokens sees."""
        return 0 if window is None else max(0, self.position + 1 - window)

    def mask(self, window: int | None, device: torch.device) -> tuple[int, Tensor] | None:
        """Which keys are hidden from which tokens; None if every token sees all.

        Returns:
            The position of the first key that is hidden from any token, and from there on
            [T, keys] fp32: 0 where a token sees a key, minus infinity where not.
        """
        if self.num_tokens == 1:
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


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor, scratch: Scratch) -> Tensor:
    """RMS norm over the last dimension, in fp32, rounded into `out`.

    x / sqrt(mean(x²) + epsilon) · weight.

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    squares = scratch.take("norm_squares", torch.float32, *x.shape)
    scale = scratch.take("norm_scale", torch.float32, *x.shape[:-1], 1)
    torch.mul(x, x, out=squares)
    torch.mean(squares, -1, keepdim=True, out=scale)
    scale.add_(epsilon).rsqrt_()
    torch.mul(x, scale, out=squares)
    return torch.mul(squares, weight, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Multiply, x [T, in] · weight [out, in]ᵀ + bias."""
    torch.mm(x, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


class AttentionBlock:
    """Grouped-query attention with optional biases, query and key norms, rope and window."""

    def __init__(
        self,
        attention: Attention,
        weights: Mapping[str, Tensor],
        norm_epsilon: float,
        cache_index: int,
    ) -> None:
        self.attention = attention
        self._qkv = weights["qkv"]
        self._qkv_bias = weights.get("qkv_bias")
        self._output = weights["attention_output"]
        self._output_bias = weights.get("attention_output_bias")
        self._qk_norm = _stacked_norms(attention, weights) if attention.qk_norm else None
        self._epsilon = norm_epsilon
        self._cache_index = cache_index

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        """[T, H] → [T, H]; appends the keys and values of these positions to the cache."""
        a, tokens, take = self.attention, step.num_tokens, step.scratch.take
        fused = linear(
            h, self._qkv, self._qkv_bias, take("qkv", h.dtype, tokens, self._qkv.shape[0])
        ).view(tokens, -1, a.head_dim)
        rotating = a.num_query_heads + a.num_kv_heads
        queries_keys = self._normalise_and_rotate(fused[:, :rotating], step)
        new = take("keys_values", h.dtype, 2, a.num_kv_heads, tokens, a.head_dim)
        new[0].copy_(queries_keys[:, a.num_query_heads :].transpose(0, 1))
        new[1].copy_(fused[:, rotating:].transpose(0, 1))
        step.cache.append(self._cache_index, step.position, new)
        mixed = self._attend(queries_keys[:, : a.num_query_heads], step, h.dtype)
        out = take("attention_out", h.dtype, tokens, self._output.shape[0])
        return linear(mixed, self._output, self._output_bias, out)

    def _normalise_and_rotate(self, heads: Tensor, step: Step) -> Tensor:
        """Query and key heads [T, Q + K, D], normed and rotated in fp32."""
        take = step.scratch.take
        shape = heads.shape
        if self._qk_norm is not None:
            source = take("qk", torch.float32, *shape).copy_(heads)
            heads = take("qk_normed", torch.float32, *shape)
            rms_norm(source, self._qk_norm, self._epsilon, heads, step.scratch)
        if not self.attention.rope:
            return heads
        if heads.dtype is not torch.float32 or not heads.is_contiguous():
            heads = take("qk", torch.float32, *shape).copy_(heads)
        return step.rotary.rotate(heads, step.position, take("qk_rotated", torch.float32, *shape))

    def _attend(self, queries: Tensor, step: Step, dtype: torch.dtype) -> Tensor:
        """softmax(q kᵀ / √D) v for queries [T, Q, D] → [T, Q · D], some tokens at a time."""
        a, tokens = self.attention, step.num_tokens
        num_keys = step.position + tokens - step.first_key(a.window)
        tile = max(1, min(tokens, SCORE_VALUES // (a.num_query_heads * num_keys)))
        mixed = step.scratch.take("mixed_by_token", dtype, tokens, a.num_query_heads * a.head_dim)
        for first in range(0, tokens, tile):
            rows = slice(first, min(first + tile, tokens))
            self._attend_tile(queries[rows], rows, step, mixed[rows])
        return mixed

    def _attend_tile(self, queries: Tensor, rows: slice, step: Step, out: Tensor) -> None:
        """Attention of the tokens `rows` of this step.

        The queries that share a KV head are rows of one matrix product: [K, Q / K · t, D].
        """
        a, tokens, dtype, take = self.attention, len(queries), out.dtype, step.scratch.take
        groups, group, dim = a.num_kv_heads, a.queries_per_kv_head, a.head_dim
        start, stop = step.first_key(a.window), step.position + step.num_tokens
        keys, values = step.cache.view(self._cache_index, start, stop)
        grouped = take("queries", dtype, groups, group, tokens, dim)
        grouped.copy_(queries.view(tokens, groups, group, dim).permute(1, 2, 0, 3))

        def growing(name: str, dtype: torch.dtype) -> Tensor:
            shape = (groups, group * tokens, stop - start)
            most = max(groups * group * step.cache.capacity, SCORE_VALUES)
            return step.scratch.take_growing(name, dtype, shape, most)

        scores = growing("scores", dtype)
        grouped = grouped.view(groups, group * tokens, dim)
        torch.baddbmm(scores, grouped, keys.mT, beta=0, alpha=dim**-0.5, out=scores)
        masked = step.mask(a.window, scores.device)
        if masked is not None:
            first_hidden, mask = masked
            by_token = scores.view(-1, tokens, stop - start)
            by_token[:, :, first_hidden - start :].add_(mask[rows])
        shares = torch.softmax(
            scores, -1, dtype=torch.float32, out=growing("shares", torch.float32)
        )
        if dtype is not torch.float32:
            shares = scores.copy_(shares)
        mixed = take("mixed", dtype, groups, group * tokens, dim)
        torch.bmm(shares, values, out=mixed)
        out.view(tokens, groups, group, dim).copy_(
            mixed.view(groups, group, tokens, dim).permute(2, 0, 1, 3)
        )


class MlpBlock:
    """down(silu(gate(x)) · up(x)). Source: Shazeer, arXiv 2002.05202."""

    def __init__(self, mlp: Mlp, weights: Mapping[str, Tensor]) -> None:
        self.mlp = mlp
        self._gate_up = weights["gate_up"]
        self._gate_up_bias = weights.get("gate_up_bias")
        self._down = weights["down"]
        self._down_bias = weights.get("down_bias")

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        """[T, H] → [T, H]."""
        take, tokens, ffn = step.scratch.take, step.num_tokens, self.mlp.intermediate_size
        both = take("gate_up", h.dtype, tokens, 2 * ffn)
        linear(h, self._gate_up, self._gate_up_bias, both)
        gate, up = both[:, :ffn], both[:, ffn:]
        gated = take("gated", h.dtype, tokens, ffn)
        torch.ops.aten.silu.out(gate, out=gated)
        gated.mul_(up)
        out = take("mlp_out", h.dtype, tokens, self._down.shape[0])
        return linear(gated, self._down, self._down_bias, out)


def _stacked_norms(a: Attention, weights: Mapping[str, Tensor]) -> Tensor:
    """Scales of all query and key heads as one [Q + K, D] matrix, so that one norm serves both."""
    queries = weights["q_norm"].float().expand(a.num_query_heads, -1)
    keys = weights["k_norm"].float().expand(a.num_kv_heads, -1)
    return torch.cat([queries, keys])
