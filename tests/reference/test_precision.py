"""16-bit modes: as close to the fp32 logits as transformers' own 16-bit forward, or closer."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from reference.compare import divergence
from reference.oracle import Case, build, load, oracle_logits, prompt, run, save
from soloist.model.dtype import Dtype
from soloist.model.torch_types import TORCH_DTYPES

CASES = [
    Case("gqa", "llama", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    Case("biases", "qwen2", {"hidden_size": 48, "num_attention_heads": 6}),
    Case("norms", "qwen3", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 24}),
]


def in_16_bits(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Parameters in `dtype`; the rope table stays fp32, as from_pretrained keeps it."""
    table = model.model.rotary_emb.inv_freq.clone()
    model = model.to(dtype)
    model.model.rotary_emb.inv_freq = table
    return model


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
        model = load(folder, dtype)
        assert model.dtype is TORCH_DTYPES[dtype]
        ours += divergence(run(model, ids, [150] + [1] * 50), exact)
        theirs += divergence(oracle_logits(in_16_bits(oracle, TORCH_DTYPES[dtype]), ids), exact)
    assert ours <= theirs, f"KL {ours / 3:.3g} nats a token, transformers {theirs / 3:.3g}"
    assert ours < 0.01, f"KL {ours / 3:.3g} nats a token"
