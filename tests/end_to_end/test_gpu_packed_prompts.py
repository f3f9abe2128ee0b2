"""Prompts read from packed weights on a GPU: near those from rows, with bits of their own.

Logits differ in their last bits, since libraries may add in another order. How a prompt is cut
changes no bit.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plan.shapes import SHAPES
from soloist.bench.subject import Reading, rounded_shape, shape_on_gpu, shape_placement
from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.errors import SettingError
from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.folder import shipped_folder
from soloist.model.quantized import AT_LOAD, Codes
from soloist.prefill.packed_matrices import PackedMatrices
from soloist.prefill.widths import candidate_widths
from soloist.weights.choice import Rounding
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, plan_export
from unit.gguf.writing import write
from unit.model.tiny import described, random_tensors

pytestmark = pytest.mark.gpu

CONTEXT = 2560
# Relative error of logits: both ways round to 16 bits after every product.
MOST_DIFFERENCE = 0.03
# The same where activations have 4 bits of precision.
MOST_EIGHT_BIT_DIFFERENCE = 0.3
LENGTHS = (20, 128, 300, 1000, 2048)


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def load(model: object, **asked: object) -> Engine:
    config = EngineConfig(str(model), "cuda", context_tokens=CONTEXT)
    return Engine.load(replace(config, **asked))  # type: ignore[arg-type]


def prompt(vocab_size: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(vocab_size, (tokens,), generator=generator).tolist()


def logits(model: object, vocab_size: int, tokens: int, chunk: int | None = None) -> Tensor:
    """Of a prompt's last token."""
    assert isinstance(model, KernelModel)
    ids, most = prompt(vocab_size, tokens), chunk or model.prefill.most_tokens
    found = model.prefill.run_prompt(ids, model.page_tables[0], most, lambda: False)
    assert found is not None
    return found.clone()


def require_near(seen: Tensor, wanted: Tensor) -> None:
    assert torch.isfinite(seen).all()
    assert (seen - wanted).norm() <= MOST_DIFFERENCE * wanted.norm()


@pytest.mark.parametrize("codes", [None, *AT_LOAD.values()], ids=str)
def test_prompts_are_those_read_from_rows(codes: Codes | None, tmp_path: Path) -> None:
    """étude, whose head is its embedding unless it is quantised."""
    folder = shipped_folder("etude")
    if codes is not None:
        folder = tmp_path / "etude"
        write_export(plan_export(shipped_folder("etude"), Asked(codes, Codes.INT8)), folder)
    rows, packed = load(folder), load(folder, packed_prompts=True)
    assert isinstance(packed.model, KernelModel)
    products = packed.model.prefill.parts[0].work.products
    assert isinstance(products, PackedMatrices)
    vocab = rows.config.vocab_size
    for tokens in LENGTHS:
        require_near(logits(packed.model, vocab, tokens), logits(rows.model, vocab, tokens))


def gguf_file(folder: Path, kind: str, mixed: str | None = None) -> Path:
    """A random model whose columns are whole super-blocks; `mixed`: of v and of down."""
    sizes = {
        "hidden_size": 1024, "intermediate_size": 1280, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
        "max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    _, specs = described(folder, **sizes)
    values = {
        name: x * x.shape[-1] ** -0.5 if x.dim() > 1 else torch.ones_like(x)
        for name, x in random_tensors(specs).items()
    }

    def type_of(name: str) -> str:
        return mixed if mixed and ("v_proj" in name or "down_proj" in name) else kind

    return write(folder / "model.gguf", {"model_type": "llama", **sizes}, values, type_of)


@pytest.mark.parametrize(
    ("kind", "mixed"),
    [("Q4_0", None), ("Q4_1", None), ("Q4_K", None), ("Q5_K", None), ("Q6_K", None),
     ("Q4_K", "Q6_K"), ("Q5_K", "Q6_K")],
)  # fmt: skip
def test_prompts_of_gguf_files_are_those_read_from_rows(
    kind: str, mixed: str | None, tmp_path: Path
) -> None:
    """How a prompt is cut changes no bit."""
    file = gguf_file(tmp_path, kind, mixed)
    rows = load(file, packed_prompts=False)
    packed = load(file, packed_prompts=True, keeps_prefixes=True, sequences=2)
    assert isinstance(packed.model, KernelModel)
    vocab = rows.config.vocab_size
    for tokens in LENGTHS:
        seen = logits(packed.model, vocab, tokens)
        require_near(seen, logits(rows.model, vocab, tokens))
        assert torch.equal(logits(packed.model, vocab, tokens, LEAST_CHUNK_TOKENS), seen)


def test_all_widths_are_batch_invariant() -> None:
    """A prompt's bits do not depend on how it is cut."""
    packed = load("etude", packed_prompts=True, keeps_prefixes=True, sequences=2)
    assert isinstance(packed.model, KernelModel)
    vocab, prefill = packed.config.vocab_size, packed.model.prefill
    # Up to 128 tokens products may have their sums in parts.
    wider = [w for w in candidate_widths(prefill.most_tokens) if w > 128]
    assert [w for w in prefill.widths if w > 128] == wider
    for tokens in (700, 1500, 2048):
        whole = logits(packed.model, vocab, tokens)
        for chunk in (LEAST_CHUNK_TOKENS, 512):
            assert torch.equal(logits(packed.model, vocab, tokens, chunk), whole)


@pytest.mark.parametrize("codes", [None, Codes.FP8, Codes.INT4], ids=str)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama"])
def test_public_shapes(name: str, codes: Codes | None) -> None:
    config = read_config(SHAPES[name])
    placed = shape_placement(SHAPES[name], "bf16", torch.device("cuda"), "cuda", 1)
    shape = rounded_shape(config, Dtype.BF16, Rounding(codes, None))
    found = []
    for packed_prompts in (False, True):
        model = shape_on_gpu(shape, CONTEXT, placed, reading=Reading(packed_prompts))
        found.append([logits(model, config.vocab_size, tokens) for tokens in (128, 2048)])
        del model
        torch.cuda.empty_cache()
    for wanted, seen in zip(*found, strict=True):
        require_near(seen, wanted)


def test_prompts_in_eight_bits_are_near_those_in_sixteen(tmp_path: Path) -> None:
    """étude in FP8, whose activations are rounded as its weights were; no cut changes a bit."""
    folder = tmp_path / "etude"
    write_export(plan_export(shipped_folder("etude"), Asked(Codes.FP8, Codes.INT8)), folder)
    rows = load(folder)
    vocab = rows.config.vocab_size
    wanted = [logits(rows.model, vocab, tokens) for tokens in LENGTHS]
    eight = load(
        folder, packed_prompts=True, eight_bit_prompts=True, keeps_prefixes=True, sequences=2
    )
    assert isinstance(eight.model, KernelModel)
    products = eight.model.prefill.parts[0].work.products
    assert isinstance(products, PackedMatrices)
    for tokens, of_rows in zip(LENGTHS, wanted, strict=True):
        seen = logits(eight.model, vocab, tokens)
        assert torch.isfinite(seen).all()
        assert not torch.equal(seen, of_rows)
        assert (seen - of_rows).norm() <= MOST_EIGHT_BIT_DIFFERENCE * of_rows.norm()
    assert any(form.eight_bits for form in products.forms)
    for tokens in (700, 2048):
        whole = logits(eight.model, vocab, tokens)
        for chunk in (LEAST_CHUNK_TOKENS, 512):
            assert torch.equal(logits(eight.model, vocab, tokens, chunk), whole)


def test_a_public_shape_in_eight_bits() -> None:
    """All matrices of a layer, where étude's rows are too short for some."""
    config = read_config(SHAPES["llama-3.2-1b"])
    placed = shape_placement(SHAPES["llama-3.2-1b"], "bf16", torch.device("cuda"), "cuda", 1)
    shape, found = rounded_shape(config, Dtype.BF16, Rounding(Codes.FP8, None)), []
    for eight_bits in (False, True):
        reading = Reading(packed_prompts=True, eight_bit_prompts=eight_bits)
        model = shape_on_gpu(shape, CONTEXT, placed, reading=reading)
        found.append([logits(model, config.vocab_size, tokens) for tokens in (128, 2048)])
        if eight_bits:
            cut = logits(model, config.vocab_size, 2048, LEAST_CHUNK_TOKENS)
            assert torch.equal(cut, found[-1][-1])
        del model
        torch.cuda.empty_cache()
    for wanted, seen in zip(*found, strict=True):
        assert torch.isfinite(seen).all()
        assert 0 < (seen - wanted).norm() <= MOST_EIGHT_BIT_DIFFERENCE * wanted.norm()


def test_eight_bits_of_other_models_are_refused() -> None:
    with pytest.raises(SettingError, match="FP8 with one scale per row"):
        load("etude", packed_prompts=True, eight_bit_prompts=True)


def test_memory_is_that_of_one_copy() -> None:
    """Once a model is loaded, nothing as large as its weights lies beside them."""
    torch.cuda.empty_cache()
    name = "llama-3.2-1b"
    config = read_config(SHAPES[name])
    placed = shape_placement(SHAPES[name], "bf16", torch.device("cuda"), "cuda", 1)
    before = torch.cuda.memory_allocated()
    model = shape_on_gpu(
        rounded_shape(config, Dtype.BF16), CONTEXT, placed, reading=Reading(packed_prompts=True)
    )
    logits(model, config.vocab_size, 2048)
    taken = torch.cuda.memory_allocated() - before
    assert taken <= 1.25 * model.plan.image.num_bytes
