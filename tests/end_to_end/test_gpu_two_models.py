"""One kernel that holds two models of different sizes: each makes the tokens of its own kernel."""

from pathlib import Path

import pytest
import torch

from interpreter.models import CONTEXT, configured, prompt
from soloist.engine.kernel import Capacity, load_kernel
from soloist.jit.compiler import compile_source
from soloist.jit.module import Module
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES, THREADS
from soloist.megakernel.plan import Plan
from soloist.model.config import ModelConfig
from unit.megakernel import two_models
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

ROUNDS = 100  # two pages


def loaded(config: ModelConfig, plan: Plan) -> Decoder:
    """A model of random weights on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    weights = {k: v.to(device, torch.bfloat16) for k, v in random_weights(config).items()}
    model = load_kernel(plan, [weights], [device], Capacity(CONTEXT), None, keep_rows=True)
    assert isinstance(model.decoder, Decoder)
    return model.decoder


def queries_of(config: ModelConfig, count: int) -> list[Query]:
    """Positions side by side of one sequence, whose tokens are given."""
    ids = prompt(config, count * ROUNDS)
    return [Query(0, c, ids[c::count], stride=count) for c in range(count)]


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize(
    "names",
    [("qwen3-norms-128", "llama-untied-biases-32"), ("mistral-window-96", "smollm3-nope-64")],
    ids="-then-".join,
)
def test_two_models_in_one_kernel(names: tuple[str, str], queries: int, tmp_path: Path) -> None:
    configs, plans = zip(*(configured(name, tmp_path) for name in names), strict=True)
    first, second = plans = two_models.with_one_grid(*plans)
    decoders = [loaded(*pair) for pair in zip(configs, plans, strict=True)]
    build = Build(queries=1 if queries == 1 else MAX_QUERIES)
    source = two_models.source(first, second, build, tmp_path)
    module = Module(compile_source(source, first.gpu.arch), two_models.ENTRY)
    free = [[Query(0, 0, prompt(config, 5))] for config in configs]
    given = free if queries == 1 else [queries_of(config, queries) for config in configs]
    rounds = ROUNDS if queries == 1 else CONTEXT // queries
    wanted = [d.run(c, rounds) for d, c in zip(decoders, given, strict=True)]
    logits = [d.logits[:queries].clone() for d in decoders]
    for _ in range(3):
        for decoder, launch in zip(decoders, given, strict=True):
            # What the other launch left must not pass for this one's.
            decoder.logits.zero_()
            decoder.pool.zero_()
            decoder._shown[:] = 0
            decoder.prepare(decoder.pack(launch, rounds))
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream().cuda_stream
        arguments = [decoder._prepared.params for decoder in decoders]
        shared = two_models.shared_bytes(first, second, build)
        module.launch(first.grid_blocks, THREADS, shared, arguments, stream)
        torch.cuda.synchronize()
        for decoder, tokens, scores in zip(decoders, wanted, logits, strict=True):
            assert decoder.fault is None
            assert decoder._shown[: len(tokens), :queries].tolist() == tokens
            assert torch.equal(decoder.logits[:queries], scores)
