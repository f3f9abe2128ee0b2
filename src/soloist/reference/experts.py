"""A mixture of experts as the definition of the maths. Source: Shazeer et al., arXiv 1701.06538.

Each token's own experts, and only those, are multiplied with. In a pass of several tokens the rows
of an expert are multiplied some at a time, always as many, filled up with zeros: so the bits of a
token do not depend on how many others chose the expert.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.model.config import Mixture, Mlp, Router
from soloist.reference.blocks import MlpBlock, Step, activate, by_columns, linear
from soloist.reference.memory import expert_rows


class Choice(NamedTuple):
    """What a router makes of T tokens.

    Attributes:
        experts: [T, k] int64, of each token in ascending order.
        shares: [T, k] fp32, what their results are multiplied by.
    """

    experts: Tensor
    shares: Tensor


def choose(router: Router, logits: Tensor, correction: Tensor | None = None) -> Choice:
    """Experts by logits [T, E] in fp32; `correction` [E] is added to scores for the choice alone.

    Sources: Shazeer et al., arXiv 1701.06538, for the softmax; DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2, for corrected sigmoids and groups.
    """
    is_softmax = router.scores == "softmax"
    scores = torch.softmax(logits, -1) if is_softmax else torch.sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if router.num_groups > 1:
        groups = ranked.view(-1, router.num_groups, router.num_experts // router.num_groups)
        best = groups.topk(2, -1).values.sum(-1)
        kept = _highest(best, router.num_groups_kept)
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, value=False)
        ranked = groups.masked_fill(is_left_out[..., None], -torch.inf).flatten(-2)
    experts = _highest(ranked, router.num_chosen).sort(-1).values
    shares = scores.gather(-1, experts)
    if router.normalises:
        shares = shares / (shares.sum(-1, keepdim=True) + router.least_sum)
    return Choice(experts, shares * router.scale if router.scale != 1 else shares)


def _highest(values: Tensor, count: int) -> Tensor:
    """Indices of the highest values of each row; of equal ones the lower index comes first."""
    return torch.sort(values, stable=True, dim=-1, descending=True).indices[..., :count]


class MixtureBlock:
    """What a token's experts give, each times its share, beside an MLP that all tokens take."""

    def __init__(self, mixture: Mixture, weights: Mapping[str, Tensor]) -> None:
        self._mixture = mixture
        self._router = by_columns(weights["router"].float())
        self._correction = weights.get("router_correction")
        self._experts = [
            _expert(mixture, weights, f"experts.{expert}.")
            for expert in range(mixture.router.num_experts)
        ]
        self._shared, self._shared_gate = None, None
        if mixture.shared is not None:
            self._shared = MlpBlock(mixture.shared, _under(weights, "shared."))
            if mixture.gates_shared:
                self._shared_gate = by_columns(weights["shared_gate"].float())

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        """[T, H] → [T, H] in fp32."""
        scratch = step.scratch
        wide = scratch.take("router_input", torch.float32, *h.shape).copy_(h)
        out = scratch.take("mixture_out", torch.float32, *h.shape)
        if self._shared is None:
            out.zero_()
        else:
            out.copy_(self._shared(h, step))
        if self._shared_gate is not None:
            out.mul_(torch.sigmoid(wide @ self._shared_gate))
        choice = choose(self._mixture.router, wide @ self._router, self._correction)
        if h.shape[0] == 1:
            experts, shares = choice.experts[0].tolist(), choice.shares[0].tolist()
            for expert, share in zip(experts, shares, strict=True):
                out.add_(self._experts[expert](h, step), alpha=share)
        else:
            self._add_by_expert(out, h, choice, step)
        return out

    def _add_by_expert(self, out: Tensor, h: Tensor, choice: Choice, step: Step) -> None:
        """Add all tokens' results, expert by expert."""
        router = self._mixture.router
        most = expert_rows(router)
        x = step.scratch.take("expert_rows", h.dtype, most, h.shape[1])
        flat, shares = choice.experts.flatten(), choice.shares.flatten()[:, None]
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=router.num_experts).tolist()
        stop = 0
        for expert, count in zip(self._experts, counts, strict=True):
            first, stop = stop, stop + count
            for start in range(first, stop, most):
                places = order[start : min(start + most, stop)]
                tokens, num_rows = places // router.num_chosen, len(places)
                x[:num_rows] = h[tokens]
                x[num_rows:] = 0
                given = expert(x, step)[:num_rows].float()
                out.index_add_(0, tokens, given * shares[places])


class MappedBlock:
    """The same as `MlpBlock` of matrices [out, in] that lie in a file, and stay there."""

    def __init__(self, mlp: Mlp, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self.mlp, self._gate, self._up, self._down = mlp, gate.mT, up.mT, down.mT

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        """[T, H] → [T, H]."""
        tokens, ffn, dtype = h.shape[0], self._gate.shape[1], h.dtype
        gate = linear(h, self._gate, None, step.scratch.take("gate", dtype, tokens, ffn))
        up = linear(h, self._up, None, step.scratch.take("up", dtype, tokens, ffn))
        activate(gate, self.mlp.activation)
        gate.mul_(up)
        out = step.scratch.take("mlp_out", dtype, *h.shape)
        return linear(gate, self._down, None, out)


def _expert(mixture: Mixture, weights: Mapping[str, Tensor], at: str) -> MlpBlock | MappedBlock:
    if f"{at}gate_up.0" not in weights:
        return MlpBlock(mixture.expert, _under(weights, at))
    names = ("gate_up.0", "gate_up.1", "down.0")
    return MappedBlock(mixture.expert, *(weights[at + name] for name in names))


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """An MLP's tensors."""
    return {name: weights[prefix + name] for name in ("gate_up", "down")}
