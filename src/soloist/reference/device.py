"""The interface that every reference model offers: allocate a cache, step over tokens."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Literal

import torch
from torch import Tensor

from soloist.model.config import ModelConfig
from soloist.model.kv_format import KvFormat
from soloist.model.torch_types import Weights
from soloist.reference.blocks import Rotary, Step, by_columns, rms_norm
from soloist.reference.cache import KVCache, Scratch
from soloist.reference.memory import least_rows
from soloist.reference.passes import Pass

LogitRows = Literal["none", "last", "all"]

# Steps of at most this many tokens keep their scratch; what longer ones took is given back.
KEPT_TOKENS = 8


class Reference(ABC):
    """A model with its weights on one torch device.

    Args:
        config: what it computes.
        weights: one tensor for each `TensorSpec`, on one device and all of one dtype but those that
            are exact; taken over, so that a tensor which is laid out anew does not stay in memory
            twice.
        kv: what caches store keys and values as; None stores them as they are.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kv: KvFormat | None = None) -> None:
        self.config, self.kv = config, kv
        embedding = weights.pop("embedding")
        self._head = by_columns(embedding if config.tied_head else weights.pop("head"))
        self._embedding = None if config.tied_head else embedding
        self._epsilon = torch.tensor(config.norm_epsilon, device=self.device)
        self._scratch = Scratch(self.device)
        self._rotaries: tuple[Rotary, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._head.device

    @property
    def dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return self._head.dtype

    def new_cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence of up to `capacity` tokens."""
        self.reach(capacity)
        return KVCache(
            self._cache_shapes(), capacity, self.dtype, self.device, self.kv, self._key_order()
        )

    def _key_order(self) -> list[int] | None:
        """In which the numbers of a key share scales: as the decode kernel has them."""
        head_dim = self.config.layers[0].attention.head_dim
        of_parts = self.kv is not None and 0 < self.kv.scale_values < head_dim
        if not of_parts or self.config.rope.is_in_halves(head_dim):
            return None
        return self.config.rope.order_in_halves(head_dim)

    def reach(self, num_positions: int) -> None:
        """Make the rope tables for so many positions, at least; of many it takes a while."""
        if not self._rotaries or self._rotaries[0].cos.shape[0] < num_positions:
            head_dim = self.config.layers[0].attention.head_dim
            self._rotaries = tuple(
                Rotary(rope, head_dim, num_positions, self.device) for rope in self.config.ropes
            )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        position: int,
        cache: KVCache,
        rows: LogitRows = "last",
        *,
        by_rows: bool = False,
    ) -> Tensor | None:
        """Run T consecutive tokens of one sequence.

        Args:
            token_ids: [T] int64 on this device.
            position: of the first token; the cache holds everything before it.
            cache: gains the keys and values of these positions.
            rows: for which tokens logits are wanted.
            by_rows: see `Step`.

        Returns:
            fp32 logits [T, V] or [1, V], or None; for small T valid until the next call.
        """
        whole = self.begin(token_ids, position, cache, rows, by_rows=by_rows)
        while not whole.is_over:
            whole.advance(self._scratch)
        if whole.num_tokens > KEPT_TOKENS:
            self._scratch = Scratch(self.device)
        return whole.logits

    def begin(
        self,
        token_ids: Tensor,
        position: int,
        cache: KVCache,
        rows: LogitRows = "last",
        *,
        by_rows: bool = False,
    ) -> Pass:
        """The same as a pass that is computed block by block; arguments as of `forward`.

        When its attention of a layer runs, the cache holds everything before it in that layer.
        """
        num_tokens = token_ids.shape[0]
        assert position + num_tokens <= cache.capacity, "the caller checked the context"
        assert self._rotaries, "the cache came from new_cache"
        step = Step(position, num_tokens, self._rotaries, cache, self._scratch, by_rows)
        return Pass(step, self._parts(token_ids, step, rows))

    def _parts(
        self, token_ids: Tensor, step: Step, rows: LogitRows
    ) -> Generator[None, None, Tensor | None]:
        streams = yield from self._streams(token_ids, step)
        if rows == "none":
            return None
        return self._logits(streams[..., -1:, :] if rows == "last" else streams, step)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] → [T, H]: rows of the embedding, which of a tied head [H, V] are columns."""
        if self._embedding is None:
            return self._head.index_select(1, token_ids).t()
        return self._embedding.index_select(0, token_ids)

    def _normed(self, x: Tensor, weight: Tensor, step: Step) -> Tensor:
        """What a block takes: x [..., T, H], normalised, in the model's dtype."""
        out = step.scratch.take("block_input", self.dtype, *x.shape)
        return rms_norm(x, weight, self._epsilon, out, step.scratch)

    def least_rows(self, num_tokens: int) -> int:
        """Rows of the smallest product in a pass of so many tokens."""
        return least_rows(self.config, num_tokens)

    @abstractmethod
    def _cache_shapes(self) -> list[tuple[int, int]]:
        """(KV heads, head dimension) of every attention block."""

    @abstractmethod
    def _streams(self, token_ids: Tensor, step: Step) -> Generator[None, None, Tensor]:
        """Yield after every block; return the residual stream(s) [..., T, H] at the end, fp32.

        Nothing in `step.scratch` is used again after a yield.
        """

    @abstractmethod
    def _logits(self, streams: Tensor, step: Step) -> Tensor:
        """fp32 logits [T, V] of the given rows of the streams."""


def layer_weights(weights: Weights, layer: int) -> Weights:
    """Take the tensors of one layer, under their names without 'layers.N.'."""
    prefix = f"layers.{layer}."
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights.pop(name) for name in names}
