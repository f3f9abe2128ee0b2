"""What routers are multiplied by before the residual is known: products of two matrices."""

import torch
from torch import Tensor

from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from soloist.model.torch_types import Weights


def router_outputs(
    plan: Plan, weights: Weights, device: torch.device, dtype: torch.dtype
) -> Weights:
    """By name, of every layer that routes early, [E, columns of attention_output] in fp32.

    The router times the weights of the norm before it, times attention_output: R diag(w) Wo. Behind
    the experts' rows comes that of the gate of the MLP beside them, where there is one. Summed in
    fp64, so that nothing is lost beside what the kernel would round.

    Args:
        plan: of the kernel.
        weights: of the rank, with routers, norms and all parts of attention_output.
        device: where to multiply.
        dtype: what the kernel has attention_output in, where it is not quantised.
    """
    layers = range(plan.model.num_layers)
    early = [layer for layer in layers if plan.image.layer(layer).routes_early]
    return {
        f"layers.{layer}.router_output": _router_output(plan, weights, layer, device, dtype)
        for layer in early
    }


def _router_output(
    plan: Plan, weights: Weights, layer: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    kind = plan.image.layer(layer)

    def vector(name: str) -> Tensor:
        return weights[f"layers.{layer}.{name}"].to(device, torch.float64)

    names = ("router", "shared_gate") if "shared_gate" in kind.vectors else ("router",)
    rows = torch.cat([vector(name).view(-1, kind.hidden_size) for name in names])
    stored = kind.operations["attention_output"].matrix.format
    name = f"layers.{layer}.attention_output"
    parts = {part: weights[name + part].to(device) for part in stored.parts}
    if stored.is_plain:
        matrix = parts[""].to(dtype)
    else:
        from soloist.weights.numbers import as_numbers  # for quantised files only

        assert stored.meaning is not None, "beside experts no format has a meaning of its own"
        matrix = as_numbers(stored.meaning, parts, Dtype.FP32)
    return ((rows * vector("mlp_norm")) @ matrix.double()).float()
