"""Prompts that attend to KV pages by a kernel of ours, on a GPU: near those of libraries.

How a prompt is cut, what of it was kept and whether a graph reads it changes no bit.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plan.shapes import SHAPES
from soloist.bench.subject import Reading, rounded_shape, shape_on_gpu, shape_placement
from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.model.dtype import Dtype
from soloist.model.families import read_config

pytestmark = pytest.mark.gpu

CONTEXT = 12_288
# Relative error of logits: weights of attention are rounded to 16 bits in either way.
MOST_DIFFERENCE = 0.03
LENGTHS = (40, 128, 300, 2048, 5000, 9000)


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def load(**asked: object) -> Engine:
    config = EngineConfig("etude", "cuda", context_tokens=CONTEXT)
    return Engine.load(replace(config, **asked))  # type: ignore[arg-type]


def test_nobody_has_to_ask_for_it() -> None:
    for asked, attends in (({}, True), ({"rank_devices": (0, 0)}, False)):
        engine = load(**asked)
        assert isinstance(engine.model, KernelModel)
        operations = engine.model.prefill.parts[0].work.operations
        assert operations.attends_pages == engine.resolved.page_attention == attends


def logits(model: object, vocab_size: int, tokens: int, chunk: int | None = None) -> Tensor:
    """Of a prompt's last token."""
    assert isinstance(model, KernelModel)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(vocab_size, (tokens,), generator=generator).tolist()
    most = chunk or model.prefill.most_tokens
    found = model.prefill.run_prompt(ids, model.page_tables[0], most, lambda: False)
    assert found is not None
    return found.clone()


def require_near(seen: Tensor, wanted: Tensor) -> None:
    assert torch.isfinite(seen).all()
    assert (seen - wanted).norm() <= MOST_DIFFERENCE * wanted.norm()


@pytest.mark.parametrize("keeps", [False, True], ids=["not kept", "kept"])
def test_prompts_are_those_of_the_library(keeps: bool) -> None:
    asked = {"keeps_prefixes": keeps, "sequences": 2 if keeps else 1}
    library, own = load(page_attention=False, **asked), load(page_attention=True, **asked)
    assert isinstance(own.model, KernelModel)
    assert own.model.prefill.parts[0].work.operations.attends_pages
    assert isinstance(library.model, KernelModel)
    assert not library.model.prefill.parts[0].work.operations.attends_pages
    for tokens in (n for n in LENGTHS if n < own.resolved.context_tokens):
        vocab = own.config.vocab_size
        require_near(logits(own.model, vocab, tokens), logits(library.model, vocab, tokens))


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama"])
def test_bits_do_not_depend_on_cuts_and_graphs(name: str) -> None:
    config = read_config(SHAPES[name])
    placed = shape_placement(SHAPES[name], "bf16", torch.device("cuda"), "cuda", 1)
    shape, found = rounded_shape(config, Dtype.BF16), []
    lengths = [tokens for tokens in LENGTHS if tokens < config.context_tokens]
    for page_attention in (False, True):
        model = shape_on_gpu(
            shape, CONTEXT, placed, 2, keeps_prefixes=True,
            reading=Reading(page_attention=page_attention),
        )  # fmt: skip
        found.append([logits(model, config.vocab_size, tokens) for tokens in lengths])
        if page_attention and (widths := model.prefill.widths):
            graphs = model.prefill.parts[0].graphs
            for tokens in lengths[2:]:
                whole = logits(model, config.vocab_size, tokens)
                for chunk in (w for w in widths if w % LEAST_CHUNK_TOKENS == 0):
                    assert torch.equal(logits(model, config.vocab_size, tokens, chunk), whole)
                recorded, graphs.by_rows = graphs.by_rows, {}
                assert torch.equal(logits(model, config.vocab_size, tokens), whole)
                graphs.by_rows = recorded
        del model
        torch.cuda.empty_cache()
    for wanted, seen in zip(*found, strict=True):
        require_near(seen, wanted)
