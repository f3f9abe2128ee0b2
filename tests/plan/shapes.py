"""Models of many shapes, by configuration alone, and plans of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from soloist.megakernel.gpu import TYPICAL, Gpu
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.tile import TILE_ROWS
from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.folder import find_model
from soloist.model.rope import Rope

HEAD_DIMS = (32, 64, 96, 128)


def shaped(
    sizes: tuple[int, int, int, int, int, int, int], *, tied: bool = False, **attention: Any
) -> ModelConfig:
    """A model of (H, F, layers, Q, K, D, V)."""
    hidden, ffn, layers, queries, kv, dim, vocab = sizes
    layer = Layer(Attention(queries, kv, dim, **attention), Mlp(ffn))
    return ModelConfig(
        family="llama", hidden_size=hidden, vocab_size=vocab, context_tokens=4096,
        norm_epsilon=1e-5, layers=(layer,) * layers, rope=Rope(10_000.0), tied_head=tied,
    )  # fmt: skip


PUBLIC = {
    "llama-3.2-1b": shaped((2048, 8192, 16, 32, 8, 64, 128256), tied=True),
    "qwen3-1.7b": shaped((2048, 6144, 28, 16, 8, 128, 151936), tied=True, qk_norm=True),
    "laneformer-2b-as-llama": shaped((3072, 12288, 15, 32, 16, 96, 32000)),
    "llama-3.1-8b": shaped((4096, 14336, 32, 32, 8, 128, 128256)),
}
# Shapes that are measured, as their families' configurations.
SHAPES = {
    p.stem: p for p in sorted((Path(__file__).parents[2] / "benchmarks/shapes").glob("*.json"))
}
LANEFORMER = SHAPES.pop("laneformer-2b")  # lanes of its own: other GPUs run it
MIXTURE = SHAPES.pop("qwen3-30b-a3b")  # experts, of which other tests know
del SHAPES["qwen3-30b-a3b-12-layers"]  # the same, shorter
# Heads as GLM-4.5-Air and Qwen3-235B-A22B have them: 12 and 16 query heads to a KV head.
WIDE = {
    "twelve": shaped((4096, 10944, 2, 96, 8, 128, 151552)),
    "sixteen": shaped((4096, 12288, 2, 64, 4, 128, 151936), qk_norm=True),
}
SMALL = shaped((64, 96, 2, 4, 2, 32, 203))


def etude() -> ModelConfig:
    """The model that ships."""
    return read_config(Path(find_model("etude")) / "config.json")


def small_plan(model: ModelConfig, num_sms: int, ranks: int = 1) -> Plan:
    """In bf16 on so many SMs."""
    return make_plan(model, Dtype.BF16, Gpu("sm_90a", num_sms, 227 * 1024), ranks)


def everything() -> dict[str, ModelConfig]:
    """All of the above."""
    return {**PUBLIC, "small": SMALL, "etude": etude()}


@st.composite
def models(draw: st.DrawFn, most: int = 40, num_sms: int = 40) -> ModelConfig:
    """Small models of any shape that the kernel supports on `num_sms`; sizes count units of 8."""
    kv = draw(st.integers(1, 5))
    units = st.integers(kv, most)  # each KV head needs a block, each block a unit
    attention = Attention(
        kv * draw(st.integers(1, 16)), kv, draw(st.sampled_from(HEAD_DIMS)),
        qkv_bias=draw(st.booleans()), output_bias=draw(st.booleans()), qk_norm=draw(st.booleans()),
    )  # fmt: skip
    hidden, ffn = draw(units), draw(units)
    # A block's part of q, k and v has to fit its registers on every GPU.
    blocks = -(-9 * min(hidden, ffn, num_sms) // 10)
    assume(attention.qkv_rows <= max(kv, blocks) * 12 * TILE_ROWS)
    layer = Layer(attention, Mlp(8 * ffn, bias=draw(st.booleans())))
    windows = draw(st.lists(st.sampled_from([None, 1, 63, 64, 500]), min_size=1, max_size=3))
    return ModelConfig(
        family="llama", hidden_size=8 * hidden,
        vocab_size=draw(st.integers(1, 5000)), context_tokens=4096, norm_epsilon=1e-5,
        layers=tuple(replace(layer, attention=replace(attention, window=w)) for w in windows),
        rope=Rope(10_000.0), tied_head=draw(st.booleans()),
    )  # fmt: skip


def gpus() -> st.SearchStrategy[Gpu]:
    """The typical ones."""
    return st.sampled_from(sorted(TYPICAL.values(), key=lambda gpu: gpu.num_sms))


def all_operations(plan: Plan) -> list[Operation]:
    """Those of a layer, and the head."""
    return list(plan.operations)


def operation(plan: Plan, name: str) -> Operation:
    """Of the first layer."""
    return plan.image.operation(0, name)
