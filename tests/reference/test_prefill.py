"""Prefill in 16 bits: as close to the fp32 logits as transformers' own forward, or closer."""

from pathlib import Path

import pytest
import torch

from reference.compare import divergence
from reference.oracle import Case, build, load, oracle_logits, prompt, run, save
from reference.test_precision import in_16_bits
from soloist.kv.pool import PagePool
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.torch_types import TORCH_DTYPES
from soloist.parallel.share import Share
from soloist.prefill.part import Part
from soloist.prefill.runner import Prefill
from soloist.weights.reading import load_weights

CPU = torch.device("cpu")
CASES = [
    Case("gqa", "llama", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    Case("biases", "qwen2", {"hidden_size": 48, "num_attention_heads": 6}),
    Case("window", "mistral", {
        "hidden_size": 64, "num_attention_heads": 4, "sliding_window": 50,
    }),
    Case("norms", "qwen3", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 24}),
    Case("nope", "smollm3", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}),
]  # fmt: skip


def prefill(folder: Path, dtype: Dtype) -> Prefill:
    config = read_config(folder / "config.json")
    checkpoint, specs = open_checkpoint(folder), tensors(config)
    weights = load_weights(checkpoint, specs, dtype, CPU)
    vectors = {name: x.float() for name, x in weights.items() if x.ndim == 1}
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 4, TORCH_DTYPES[dtype], CPU)
    share = Share(config, 1, 0)
    return Prefill([Part(share, weights.__getitem__, vectors, pool, most_tokens=256)])


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_no_further_from_fp32_than_transformers(case: Case, dtype: Dtype, tmp_path: Path) -> None:
    ours = theirs = 0.0
    for seed in range(3):
        oracle = build(case, seed)
        with torch.no_grad():  # both start from weights that the 16-bit type can hold
            for parameter in oracle.parameters():
                parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))
        folder = save(oracle, case, tmp_path / str(seed))
        ids = prompt(200, oracle.config.vocab_size, seed)
        exact = run(load(folder), ids, [200])
        model, pages = prefill(folder, dtype), [2, 0, 3, 1]
        rows = []
        for stop in range(8, 201, 8):  # a first chunk gives one row of logits
            logits = model.run(ids[:stop], 0, pages)
            assert logits is not None
            rows.append(logits.clone())
        ours += divergence(torch.stack(rows), exact[7::8])
        half = oracle_logits(in_16_bits(oracle, TORCH_DTYPES[dtype]), ids)
        theirs += divergence(half[7::8], exact[7::8])
    assert ours <= theirs, f"KL {ours:.3g} against transformers' {theirs:.3g}"
