"""Mixtures of experts in a pass: which experts each token takes, and what they give it."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import Mixture, ModelConfig
from soloist.prefill.elementwise import Elementwise
from soloist.reference.experts import Choice


class ExpertProducts(ABC):
    """Lets tokens choose experts, and multiplies them by those."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the buffers."""

    @abstractmethod
    def choose(
        self, layer: int, normed: Tensor, router: Tensor, correction: Tensor | None
    ) -> Choice:
        """The experts of tokens, and their shares; valid until the next call.

        Args:
            layer: which has a mixture.
            normed: [T, H], what the layer's MLP reads.
            router: [E, H] fp32.
            correction: [E] fp32, as of `reference.experts.choose`.
        """

    @abstractmethod
    def __call__(self, layer: int, normed: Tensor, choice: Choice, out: Tensor) -> None:
        """`out` [T, H] = each token's experts, times their shares, added in fp32 in their order.

        Args:
            layer: as of `choose`.
            normed: the same.
            choice: of these tokens.
            out: of any dtype.
        """

    @abstractmethod
    def keeps_bits(self, layer: int, row: Tensor, router: Tensor) -> bool:
        """Whether rows that equal `row` [1, H] have equal results wherever they lie."""


class MixturePass:
    """The mixtures of a rank's part of a model.

    Args:
        config: what the rank has, with a mixture in some layer.
        experts: multiply.
        pool: says device and dtype.
        operations: has routers.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertProducts,
        pool: PagePool,
        operations: Elementwise,
    ) -> None:
        self._config, self._experts, self._operations = config, experts, operations
        self._device, self._dtype = pool.device, pool.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        return self._experts.num_bytes

    def __call__(self, layer: int, normed: Tensor, out: Tensor) -> None:
        """`out` [T, H] = what each token's experts give; arguments as of `ExpertProducts`."""
        self._experts(layer, normed, self.choice(layer, normed), out)

    def choice(self, layer: int, normed: Tensor) -> Choice:
        """The experts of `normed` [T, H], and their shares; valid until the next call."""
        correction = self._operations.layers[layer].router_correction
        return self._experts.choose(layer, normed, self._router(layer), correction)

    def keeps_bits(self, layer: int) -> bool:
        """Whether equal rows have equal results wherever they lie in a product of the layer."""
        generator, hidden = torch.Generator(self._device).manual_seed(0), self._config.hidden_size
        row = torch.randn(1, hidden, generator=generator, device=self._device)
        return self._experts.keeps_bits(layer, row.to(self._dtype), self._router(layer))

    def _router(self, layer: int) -> Tensor:
        router = self._operations.layers[layer].router
        assert router is not None, "the layer has experts"
        return router


def mixture_of(config: ModelConfig, layer: int) -> Mixture:
    """Of a layer that has one."""
    mixture = config.layers[layer].mlp
    assert isinstance(mixture, Mixture), "the layer has experts"
    return mixture
