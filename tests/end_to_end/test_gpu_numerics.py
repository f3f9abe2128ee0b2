"""The decode kernel's logits: near the fp32 reference, and the same bits however they are made."""

from functools import cache

import pytest
import torch
from torch import Tensor

from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.megakernel.launch import Column, Decoder
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.folder import shipped_folder
from soloist.model.weights import load_weights
from soloist.reference import build_reference

pytestmark = pytest.mark.gpu

NUM_TOKENS = 512
# Mean KL against fp32 that transformers' bf16 forward has on such text; the kernel's was 9e-5.
MOST_KL = 4.9e-4


@cache
def model() -> tuple[Engine, KernelModel]:
    engine = Engine.load(EngineConfig("etude", device="cuda"))
    kernel = engine.model
    assert isinstance(kernel, KernelModel), engine.report.refusal
    return engine, kernel


@cache
def text_ids() -> tuple[int, ...]:
    source = open(torch.nn.functional.__file__).read()  # noqa: PTH123, SIM115 - any Python text
    return tuple(model()[0].tokenizer.encode(source[:40_000])[:NUM_TOKENS])


def forced_logits(decoder: Decoder, columns: int, rounds: int) -> Tensor:
    """[T, V] of the text, `columns` positions side by side, at most `rounds` rounds a launch."""
    ids, parts, position = list(text_ids()), [], 0
    while position < len(ids):
        here = min(rounds, (len(ids) - position) // columns)
        end = position + here * columns
        kept = torch.zeros(here, columns, decoder.logits.shape[1], device="cuda")
        side_by_side = [
            Column(0, position + c, ids[position + c : end : columns], stride=columns)
            for c in range(columns)
        ]
        decoder.run(side_by_side, here, logits=kept)
        parts.append(kept.flatten(0, 1))
        position = end
    return torch.cat(parts)[:, : model()[0].config.vocab_size]


def test_logits_are_nearer_to_fp32_than_a_16_bit_forward_is():
    engine, kernel = model()
    checkpoint = open_checkpoint(shipped_folder("etude"))
    weights = load_weights(checkpoint, tensors(engine.config), Dtype.FP32, torch.device("cpu"))
    reference = build_reference(engine.config, weights)
    ids = torch.tensor(text_ids())
    wanted = reference.forward(ids, 0, reference.new_cache(len(ids)), "all")
    assert wanted is not None
    right = wanted.double().log_softmax(-1)
    got = forced_logits(kernel.decoder, 1, NUM_TOKENS).cpu().double().log_softmax(-1)
    kl = (right.exp() * (right - got)).sum(-1)
    assert kl.mean() < MOST_KL, f"mean KL {kl.mean():.2e}, largest {kl.max():.2e}"


@pytest.mark.parametrize(
    ("columns", "rounds"), [(1, 1), (1, 64), (2, 256), (4, 16), (8, 64), (8, 1)]
)
def test_bits_do_not_depend_on_columns_or_launches(columns: int, rounds: int):
    decoder = model()[1].decoder
    assert torch.equal(
        forced_logits(decoder, columns, rounds), forced_logits(decoder, 1, NUM_TOKENS)
    )


def test_a_thousand_runs_are_one():
    decoder = model()[1].decoder
    column = [Column(0, 0, list(text_ids()[:3]))]
    tokens, logits = decoder.run(column, 64), decoder.logits[0].clone()
    for _ in range(999):
        assert decoder.run(column, 64) == tokens
        assert torch.equal(decoder.logits[0], logits)
