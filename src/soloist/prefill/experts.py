"""Mixtures of experts in a pass: which experts each token takes, and what they give it.

What an MLP beside them gives all tokens is a product like that of any MLP, times its gate.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import Mixture, ModelConfig
from soloist.prefill.elementwise import Elementwise, widest
from soloist.reference.experts import Choice

# Rows that a router multiplies at once.
ROUTER_ROWS = 256
_FP32_BYTES = 4


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
    def __call__(
        self, layer: int, normed: Tensor, choice: Choice, out: Tensor, beside: Tensor | None = None
    ) -> None:
        """`out` [T, H] = each token's experts, times their shares, added in fp32 in their order.

        Args:
            layer: as of `choose`.
            normed: the same.
            choice: of these tokens.
            out: of any dtype.
            beside: [T, H], joins them.
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
        most_tokens: of a pass.

    Attributes:
        beside: [rows, H], room for what an MLP beside experts gives; no rows where there is none.
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
        self._device, self._dtype = pool.device, pool.dtype
        rows, gated = _rows_of_shared(config, most_tokens)
        hidden = config.hidden_size
        self.beside = torch.empty(rows, hidden, dtype=widest(pool), device=pool.device)
        wide = torch.float32
        self._gate_input = torch.zeros(
            min(gated, ROUTER_ROWS), hidden, dtype=wide, device=pool.device
        )
        self._gates = torch.empty(gated, 1, dtype=wide, device=pool.device)

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        own = (self.beside, self._gate_input, self._gates)
        return self._experts.num_bytes + sum(x.numel() * x.element_size() for x in own)

    def __call__(
        self, layer: int, normed: Tensor, out: Tensor, beside: Tensor | None = None
    ) -> None:
        """`out` [T, H] = what each token's experts give; arguments as of `ExpertProducts`.

        `beside`, before its gate if it has one, is changed.
        """
        if beside is not None and (gate := self._operations.layers[layer].shared_gate) is not None:
            beside.mul_(torch.sigmoid(self._logits_of_gate(normed, gate)))
        self._experts(layer, normed, self.choice(layer, normed), out, beside)

    def _logits_of_gate(self, normed: Tensor, gate: Tensor) -> Tensor:
        """[T, 1] fp32, multiplied always as many rows at a time."""
        for start in range(0, len(normed), ROUTER_ROWS):
            own = normed[start : start + ROUTER_ROWS]
            self._gate_input[: len(own)].copy_(own)
            torch.mm(self._gate_input, gate.mT, out=self._gates[start : start + ROUTER_ROWS])
        return self._gates[: len(normed)]

    def choice(self, layer: int, normed: Tensor) -> Choice:
        """The experts of `normed` [T, H], and their shares; valid until the next call."""
        correction = self._operations.layers[layer].router_correction
        return self._experts.choose(layer, normed, self._router(layer), correction)

    def keeps_bits(self, layer: int) -> bool:
        """Whether equal rows have equal results wherever they lie in a product of the layer."""
        generator, hidden = torch.Generator(self._device).manual_seed(0), self._config.hidden_size
        row = torch.randn(1, hidden, generator=generator, device=self._device)
        row = row.to(self._dtype)
        if (gate := self._operations.layers[layer].shared_gate) is not None:
            logits = self._logits_of_gate(row.expand(ROUTER_ROWS, -1), gate)
            if not bool((logits == logits[:1]).all()):
                return False
        return self._experts.keeps_bits(layer, row, self._router(layer))

    def _router(self, layer: int) -> Tensor:
        router = self._operations.layers[layer].router
        assert router is not None, "the layer has experts"
        return router


def _rows_of_shared(config: ModelConfig, most_tokens: int) -> tuple[int, int]:
    """Rows that an MLP beside experts gives in a pass of so many tokens, and that its gate has."""
    has_gate = any(mixture.gates_shared for mixture in config.mixtures)
    padded = -(-most_tokens // ROUTER_ROWS) * ROUTER_ROWS
    has_any = any(mixture.shared is not None for mixture in config.mixtures)
    return most_tokens if has_any else 0, padded if has_gate else 0


def shared_bytes(config: ModelConfig, most_tokens: int) -> int:
    """Most that `MixturePass` takes beside its experts in a pass of so many tokens.

    That is what an MLP beside them gives, and what its gate is multiplied with, on a rank that has
    these sizes.
    """
    rows, gated = _rows_of_shared(config, most_tokens)
    values = (rows + min(gated, ROUTER_ROWS)) * config.hidden_size + gated
    # Recorded passes have sigmoids of their own beside those of others.
    return (values + 2 * gated) * _FP32_BYTES


def mixture_of(config: ModelConfig, layer: int) -> Mixture:
    """Of a layer that has one."""
    mixture = config.layers[layer].mlp
    assert isinstance(mixture, Mixture), "the layer has experts"
    return mixture
