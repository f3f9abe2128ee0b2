"""Matrices that are unpacked when a prompt's pass needs them, on a GPU: the bits of kept rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from end_to_end.test_gpu_kinds_and_formats import here
from interpreter.quantised import FORMATS, alike, formats_of, quantised
from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.folder import shipped_folder
from soloist.model.quantized import AT_LOAD, Codes
from soloist.prefill.unpacked_matrices import UnpackedMatrices
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_weights
from soloist.weights.sharding import shard_all
from soloist.weights.unpacking import Unpacked, tables_of_columns
from unit.prefill.models import model

pytestmark = pytest.mark.gpu

LENGTHS = (5, 20, 128, 300)
HEADS = Attention(8, 4, 64)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_the_kernel_unpacks_what_torch_does(kind: str | None, ranks: int) -> None:
    config = model(*[HEADS] * 2, ffn=512, hidden_size=512, vocab_size=1003 if ranks == 1 else 1004)
    device = torch.device("cuda", torch.cuda.current_device())
    drawn = random_weights(tensors(config), Dtype.BF16, torch.device("cpu"))
    held = {n: x.to(torch.bfloat16) if x.ndim == 2 else x.float() for n, x in drawn.items()}
    names = [n for n in held if n.startswith("layers") and not n.endswith("norm")]
    # A share of permuted columns is no permutation.
    whole = ranks > 1 and kind is not None and FORMATS[kind].permuted
    chosen = [n for n in names if not whole or n.endswith(("qkv", "gate_up"))]
    stored = {} if kind is None else alike(config, kind, chosen)
    parts, _ = quantised(held, stored)
    plan = make_plan(config, Dtype.BF16, here(9), ranks, formats_of(stored))
    for rank in range(ranks):
        own = {name: x.to(device) for name, x in shard_all(plan.part_of(rank), parts).items()}
        packed = pack_weights(plan, own, device)
        seen = UnpackedMatrices(plan, packed, tables_of_columns(plan, packed), None)
        wanted = Unpacked(plan, packed)
        for name in [*names, "embedding", "head"]:
            assert torch.equal(seen(name), wanted(name)), name


def logits(engine: Engine, tokens: int) -> Tensor:
    """Of a prompt's last token, by a recorded pass."""
    assert isinstance(engine.model, KernelModel)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(engine.config.vocab_size, (tokens,), generator=generator).tolist()
    prefill = engine.model.prefill
    found = prefill.run_prompt(ids, engine.model.page_tables[0], prefill.most_tokens, lambda: False)
    assert found is not None
    return found.clone()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("codes", [None, *AT_LOAD.values()], ids=str)
def test_prompts_have_the_bits_of_rows(codes: Codes | None, ranks: int, tmp_path: Path) -> None:
    """étude, whose head is its embedding unless it is quantised."""
    folder = shipped_folder("etude")
    if codes is not None:
        folder = tmp_path / "etude"
        write_export(plan_export(shipped_folder("etude"), Asked(codes, Codes.INT8)), folder)
    asked = EngineConfig(
        str(folder), "cuda", context_tokens=512, packed_prompts=False,
        rank_devices=(0,) * ranks if ranks > 1 else (),
    )  # fmt: skip
    rows = Engine.load(asked)
    unpacked = Engine.load(replace(asked, packed_prompts=None, unpacks_prompts=True))
    for tokens in LENGTHS:
        assert torch.equal(logits(unpacked, tokens), logits(rows, tokens))
