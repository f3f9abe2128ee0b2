"""Mixtures of experts in a pass: which experts each token takes, and what they give it."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import Mixture, ModelConfig
from soloist.prefill.elementwise import Elementwise
from soloist.reference.experts import Choice, choose

# Rows that the router multiplies at once.
ROUTER_ROWS = 256
_FP32_BYTES, _PLACE_BYTES = 4, 8


class ExpertProducts(ABC):
    """Multiplies tokens by the experts that they chose."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the buffers."""

    @abstractmethod
    def __call__(self, layer: int, normed: Tensor, choice: Choice, out: Tensor) -> None:
        """`out` [T, H] = each token's experts, times their shares, added in fp32 in their order.

        Args:
            layer: which has a mixture.
            normed: [T, H], what the layer's MLP reads.
            choice: of these tokens.
            out: of any dtype.
        """

    @abstractmethod
    def keeps_bits(self, layer: int, row: Tensor) -> bool:
        """Whether rows that equal `row` [1, H] have equal results wherever they lie."""


class MixturePass:
    """The mixtures of a rank's part of a model.

    Args:
        config: what the rank has, with a mixture in some layer.
        experts: multiply.
        pool: says device and dtype.
        operations: has routers.
        most_tokens: of a pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertProducts,
        pool: PagePool,
        operations: Elementwise,
        most_tokens: int,
    ) -> None:
        self._config, self._experts, self._operations = config, experts, operations
        self._dtype = pool.dtype

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=pool.device)

        self._router_input = empty(ROUTER_ROWS, config.hidden_size).zero_()
        self._logits = empty(_num_logits(config, most_tokens))

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        held = (self._router_input, self._logits)
        return sum(x.numel() * x.element_size() for x in held) + self._experts.num_bytes

    def __call__(self, layer: int, normed: Tensor, out: Tensor) -> None:
        """`out` [T, H] = what each token's experts give; arguments as of `ExpertProducts`."""
        self._experts(layer, normed, self.choice(layer, normed), out)

    def choice(self, layer: int, normed: Tensor) -> Choice:
        """Of `normed` [T, H], by logits in fp32 that are multiplied always as many at a time."""
        vectors, tokens = self._operations.layers[layer], len(normed)
        assert vectors.router is not None, "the layer has experts"
        count = vectors.router.shape[0]
        padded = -(-tokens // ROUTER_ROWS) * ROUTER_ROWS
        logits = self._logits[: padded * count].view(padded, count)
        for start in range(0, tokens, ROUTER_ROWS):
            own = normed[start : start + ROUTER_ROWS]
            self._router_input[: len(own)].copy_(own)
            part = logits[start : start + ROUTER_ROWS]
            torch.mm(self._router_input, vectors.router.mT, out=part)
        router = mixture_of(self._config, layer).router
        return choose(router, logits[:tokens], vectors.router_correction)

    def keeps_bits(self, layer: int) -> bool:
        """Whether equal rows have equal results wherever they lie in a product of the layer."""
        device = self._logits.device
        generator = torch.Generator(device).manual_seed(0)
        row = torch.randn(1, self._config.hidden_size, generator=generator, device=device)
        row = row.to(self._dtype)
        self.choice(layer, row.expand(ROUTER_ROWS, -1))
        count = mixture_of(self._config, layer).router.num_experts
        logits = self._logits[: ROUTER_ROWS * count].view(ROUTER_ROWS, count)
        return bool((logits == logits[:1]).all()) and self._experts.keeps_bits(layer, row)


def mixture_of(config: ModelConfig, layer: int) -> Mixture:
    """Of a layer that has one."""
    mixture = config.layers[layer].mlp
    assert isinstance(mixture, Mixture), "the layer has experts"
    return mixture


def _num_logits(config: ModelConfig, most_tokens: int) -> int:
    padded = -(-most_tokens // ROUTER_ROWS) * ROUTER_ROWS
    return padded * max(mixture.router.num_experts for mixture in config.mixtures)


def router_bytes(config: ModelConfig, most_tokens: int) -> int:
    """Most that routers take in a pass of so many tokens; experts come on top."""
    if not config.mixtures:
        return 0
    logits = _num_logits(config, most_tokens)
    # Scores, ranks, a sort and its places, of which recorded passes have their own.
    return (ROUTER_ROWS * config.hidden_size + logits) * _FP32_BYTES + 12 * logits * _PLACE_BYTES
