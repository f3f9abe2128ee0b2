"""LongRoPE: the context that a model is used with chooses the factors, for all its positions."""

import shutil
from pathlib import Path

import pytest
import torch

from reference.compare import assert_close
from reference.oracle import Case, build, oracle_logits, prompt, run, save
from reference.test_dense import long
from soloist.cli.information import describe_attention
from soloist.engine.config import EngineConfig
from soloist.engine.engine import Engine
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import shipped_folder
from soloist.model.rope import LongScaling
from soloist.reference.build import build_reference
from soloist.reference.device import Reference
from soloist.weights.reading import load_weights

CASE = Case("long", "phi3", {**long(3, 64, partial_rotary_factor=0.75), "num_attention_heads": 3})
TOKENS = 120


def loaded(folder: Path, context_tokens: int | None) -> Reference:
    config = read_config(folder / "config.json")
    if context_tokens is not None:
        config = config.for_context(context_tokens)
    specs, checkpoint = tensors(config), open_checkpoint(folder)
    weights = load_weights(checkpoint, specs, Dtype.FP32, torch.device("cpu"))
    return build_reference(config, weights)


@pytest.mark.parametrize("context", [None, 65])
def test_long_contexts_take_the_long_factors(context: int | None, tmp_path: Path) -> None:
    """Transformers takes them for a text of more than 64 tokens that it sees at once."""
    oracle = build(CASE)
    model = loaded(save(oracle, CASE, tmp_path), context)
    ids = prompt(TOKENS, 61)
    wanted = oracle_logits(oracle, ids)
    for chunks in ([TOKENS], [1, 63, 1, 55], [1] * TOKENS):
        assert_close(run(model, ids, chunks), wanted, "transformers", f"chunks {chunks[:4]}")


def test_short_contexts_take_the_short_factors(tmp_path: Path) -> None:
    oracle = build(CASE)
    model = loaded(save(oracle, CASE, tmp_path), 64)
    ids = prompt(64, 61)
    wanted = oracle_logits(oracle, ids)
    for chunks in ([64], [1, 62, 1]):
        assert_close(run(model, ids, chunks), wanted, "transformers", f"chunks {chunks}")
    long_model = loaded(tmp_path, None)
    assert (run(long_model, ids, [64]) - wanted).abs().max() > 0.01


@pytest.mark.parametrize(("asked", "is_long"), [(None, True), (65, True), (64, False), (1, False)])
def test_the_context_that_was_asked_for_decides(
    asked: int | None, is_long: bool, tmp_path: Path
) -> None:
    """Not the one that fits into memory."""
    save(build(CASE), CASE, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped_folder("etude") / name, tmp_path)
    engine = Engine.load(EngineConfig(str(tmp_path), "cpu", "fp32", asked))
    assert isinstance(engine.config.rope.scaling, LongScaling)
    assert engine.config.rope.scaling.is_long is is_long
    described = describe_attention(engine.config)
    assert f"{'long' if is_long else 'short'} rope factors" in described
    assert "rope on 6 values of a head" in described
