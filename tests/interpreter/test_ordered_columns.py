"""A folder in GPTQ's act-order, from its files to the logits of the kernel's arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from interpreter.models import Bench, gpu, prompt, reference_logits
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.quantization.matrices import may_be_quantised
from soloist.model.torch_types import Weights
from soloist.weights.choice import Chosen, Rounding, choose
from soloist.weights.formats import formats_of
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.unpacking import parts_to_rows
from unit.model.tiny import described, random_tensors, write_single
from unit.weights.formats import FORMATS

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 208,
    "attention_bias": True, "mlp_bias": True, "max_position_embeddings": 192,
}  # fmt: skip
# Of all logits: what rounding to 16 bits may do.
MOST_ERROR = 0.02


@dataclass(frozen=True)
class Folder:
    """What is loaded of it: for the reference, and for a plan of so many ranks."""

    chosen: Chosen
    numbers: Weights
    plan: Plan
    parts: Weights


def loaded(folder: Path, name: str, ranks: int) -> Folder:
    form = next(form for form in FORMATS if form.name == name)
    config, specs = described(folder, **SIZES, quantization_config=form.config)
    matrices = {s.name for spec in specs if may_be_quantised(spec) for s in spec.sources}
    stored = {}
    for tensor, values in random_tensors(specs).items():
        scaled = values if tensor.endswith("norm.weight") else values * 0.1
        if tensor in matrices:
            stored |= form.of(tensor.removesuffix(".weight"), scaled)[0]
        else:
            stored[tensor] = scaled
    write_single(folder, stored)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(specs)
    chosen = choose(checkpoint, config, specs, Rounding())
    source = Source(
        checkpoint, config, specs, chosen.stored, chosen.rounding, neurons=chosen.neurons
    )
    plan = make_plan(config, Dtype.BF16, gpu(9), ranks, formats_of(chosen.stored, config, ranks))
    of_reference = Destination((CPU,), Dtype.FP32, False, False)
    # Whole tensors, which the bench shards.
    of_kernel = Destination((CPU,), Dtype.FP32, True, False, plan.formats)
    (numbers,), _ = load_ranks(source, of_reference, lambda _: None)
    (parts,), _ = load_ranks(source, of_kernel, lambda _: None)
    return Folder(chosen, numbers, plan, parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Folder]:
    """Each is written and loaded once."""
    return cache(lambda name, ranks: loaded(tmp_path_factory.mktemp("model"), name, ranks))


@pytest.mark.few(3)
@pytest.mark.parametrize(("ranks", "queries"), [(1, 1), (1, 8), (2, 8)])
@pytest.mark.parametrize("name", ["gptq-ordered", "gptq-ordered-zeros", "gptq-orders"])
def test_logits_are_those_of_the_numbers(
    name: str, ranks: int, queries: int, folders: Callable[[str, int], Folder]
) -> None:
    folder = folders(name, ranks)
    one_order = {"qkv", "gate_up"} if name != "gptq-orders" else set()
    split = set() if ranks > 1 else {"attention_output"}
    assert {n.rpartition(".")[2] for n, one in folder.plan.formats.items() if one.is_permuted} == (
        one_order | split | ({"head"} if name == "gptq-ordered-zeros" else set())
    )
    ids = prompt(folder.plan.model, 24 if queries > 1 else 8)
    seen = Bench(folder.plan.model, folder.plan, folder.parts, torch.bfloat16).feed(ids, queries)
    wanted = reference_logits(folder.plan.model, folder.numbers, ids)
    assert (seen - wanted).norm() / wanted.norm() < MOST_ERROR


@pytest.mark.parametrize("name", ["gptq-ordered", "gptq-orders"])
def test_neurons_move_with_the_columns_of_down(
    name: str, folders: Callable[[str, int], Folder]
) -> None:
    """Its codes lie by group without a table, and rows of gate and up, and biases, follow them."""
    folder = folders(name, 1)
    assert folder.chosen.neurons.keys() == {"layers.0.down", "layers.1.down"}
    assert not any(folder.plan.formats[down].is_permuted for down in folder.chosen.neurons)
    rows, orders = dict(folder.parts), folder.chosen.neurons
    parts_to_rows(folder.plan, rows)
    rows = {tensor: values.bfloat16() for tensor, values in rows.items()}
    for tensor, values in folder.numbers.items():
        layer, _, short = tensor.rpartition(".")
        wanted = values.bfloat16()
        if short == "down":
            wanted = wanted[:, torch.from_numpy(orders[tensor])]
        elif short in ("gate_up", "gate_up_bias"):
            order = torch.from_numpy(orders[f"{layer}.down"])
            wanted = torch.cat([half[order] for half in wanted.chunk(2)])
        assert torch.equal(rows[tensor], wanted), tensor
