"""The decode kernel's logits: near the fp32 reference, and the same bits however they are made."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soloist.bench.agreement import agreement, forced_logits
from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.megakernel.launch import Query
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.folder import shipped_folder
from soloist.reference.build import build_reference
from soloist.weights.reading import load_weights

pytestmark = pytest.mark.gpu

NUM_TOKENS = 512
CONFIG = shipped_folder("etude") / "config.json"
# Mean KL against fp32 that transformers' bf16 forward has on such text; the kernel's was 9e-5.
MOST_KL = 4.9e-4


@cache
def model(ranks: int = 1) -> tuple[Engine, KernelModel]:
    """Several ranks share the GPU."""
    where = {"rank_devices": (0,) * ranks} if ranks > 1 else {}
    engine = Engine.load(EngineConfig("etude", device="cuda", **where))
    kernel = engine.model
    assert isinstance(kernel, KernelModel), engine.report.refusal
    return engine, kernel


@cache
def text_ids() -> tuple[int, ...]:
    source = Path(torch.nn.functional.__file__).read_text(encoding="utf-8")  # any Python text
    return tuple(model()[0].tokenizer.encode(source[:40_000])[:NUM_TOKENS])


def kernel_logits(queries: int, rounds: int, ranks: int = 1) -> Tensor:
    """[T, V] of the text, `queries` positions side by side, at most `rounds` rounds a launch."""
    engine, kernel = model(ranks)
    return forced_logits(kernel.decoder, engine.config.vocab_size, text_ids(), queries, rounds)


@cache
def exact_logits() -> Tensor:
    """[T, V] of the fp32 reference."""
    engine, _ = model()
    checkpoint = open_checkpoint(shipped_folder("etude"))
    weights = load_weights(checkpoint, tensors(engine.config), Dtype.FP32, torch.device("cpu"))
    reference = build_reference(engine.config, weights)
    ids = torch.tensor(text_ids())
    wanted = reference.forward(ids, 0, reference.new_cache(len(ids)), "all")
    assert wanted is not None
    return wanted


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_logits_are_nearer_to_fp32_than_a_16_bit_forward_is(ranks: int):
    logits = kernel_logits(1, NUM_TOKENS, ranks)
    found = agreement(exact_logits(), logits, torch.tensor(text_ids()).roll(-1))
    assert found.mean_kl < MOST_KL, found
    assert abs(found.nll_difference) < 3 * found.nll_standard_error, found


@pytest.mark.parametrize(
    ("ranks", "queries", "rounds"),
    [
        *((1, *steps) for steps in ((1, 1), (1, 64), (2, 256), (4, 16), (8, 64), (8, 1))),
        *((ranks, *steps) for ranks in (2, 4, 8) for steps in ((1, 64), (8, 16))),
    ],
)
def test_bits_do_not_depend_on_queries_or_launches(ranks: int, queries: int, rounds: int):
    assert torch.equal(kernel_logits(queries, rounds, ranks), kernel_logits(1, NUM_TOKENS, ranks))


@pytest.mark.parametrize("subject", [("etude",), ("--shape", CONFIG)])
def test_the_command_finds_the_same(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    done = soloist("bench", "accuracy", *subject, "--repeats", 3, "-o", file)
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert row["engine"] == "soloist, decode kernel"
    assert row["mean_kl"] < MOST_KL
    assert len(row["same_bits"]) == 5
    assert row["repeats"] == 3


def test_a_thousand_runs_are_one():
    decoder = model()[1].decoder
    query = [Query(0, 0, list(text_ids()[:3]))]
    tokens, logits = decoder.run(query, 64), decoder.logits[0].clone()
    for _ in range(999):
        assert decoder.run(query, 64) == tokens
        assert torch.equal(decoder.logits[0], logits)
