"""Tiny models of every dense family, and what runs them: the interpreter and the reference."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL, Gpu
from soloist.megakernel.interpreter import (
    Interpreter,
    LaneInterpreter,
    Memory,
    lanes_of_plan,
    round_of_lanes,
    round_of_ranks,
)
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.program import OF_EXPERTS
from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.kv_format import KvFormat
from soloist.model.quantized import COLUMNS
from soloist.model.rope import Rope
from soloist.model.torch_types import Weights
from soloist.prefill import elementwise
from soloist.reference.build import build_reference
from soloist.weights.packing import ordered, pack, place, place_expert, table_of
from soloist.weights.routers import router_outputs
from soloist.weights.sharding import shard_all
from unit.model.configurations import (
    ABSENT,
    GLM4_9B_CHAT,
    LLAMA_32_1B,
    MISTRAL_7B,
    MISTRAL_SMALL_31_24B,
    PHI4_MINI,
    QWEN3_17B,
    QWEN25_05B,
    SMOLLM3_3B,
    changed,
    changed_text,
    written,
)

CONTEXT = 192
TINY = {
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,
    "max_position_embeddings": CONTEXT,
    "max_window_layers": ABSENT,
    "layer_types": ABSENT,
    "rope_scaling": ABSENT,
}

# config.json of the family, SMs. Sizes are chosen so that blocks own unequally many units.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "llama-tied-64": (changed(LLAMA_32_1B, **{**TINY, "head_dim": 64}), 7),
    "llama-untied-biases-32": (
        changed(
            LLAMA_32_1B,
            **{**TINY, "head_dim": 32, "num_attention_heads": 12, "vocab_size": 2003},
            tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
        ), 9,
    ),
    "llama-one-kv-head-128": (
        changed(
            LLAMA_32_1B,
            **{**TINY, "head_dim": 128, "num_key_value_heads": 1, "intermediate_size": 1544},
        ), 8,
    ),
    "mistral-window-96": (
        changed(MISTRAL_7B, **TINY, head_dim=96, sliding_window=20), 9,
    ),
    "mistral-wide-window-32": (
        changed(MISTRAL_7B, **TINY, head_dim=32, sliding_window=75), 6,
    ),
    "qwen2-bias-tied-64": (
        changed(QWEN25_05B, **{**TINY, "hidden_size": 256, "num_key_value_heads": 4}), 12,
    ),
    "qwen3-norms-128": (
        changed(QWEN3_17B, **TINY, head_dim=128, tie_word_embeddings=False), 7,
    ),
    "qwen3-wide-32": (
        changed(QWEN3_17B, **{**TINY, "hidden_size": 600, "intermediate_size": 1040}, head_dim=32),
        11,
    ),
    "smollm3-nope-64": (
        changed(
            SMOLLM3_3B,
            **{**TINY, "hidden_size": 256, "num_hidden_layers": 3},
            no_rope_layers=[1, 0, 1],
        ), 10,
    ),
    "phi3-partial-long-64": (
        changed(
            PHI4_MINI,
            **{
                **TINY,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 24,
                    "long_factor": [1 + i / 8 for i in range(24)],
                },
            },
            head_dim=64,
            original_max_position_embeddings=64,
        ), 8,
    ),
    "mistral3-text-32": (
        changed_text(MISTRAL_SMALL_31_24B, **TINY, head_dim=32), 7,
    ),
    "glm-neighbours-biases-32": (
        changed(GLM4_9B_CHAT, **TINY, head_dim=32), 9,
    ),
    # More than 8 query heads to a KV head.
    "glm-twelve-heads-64": (
        changed(
            GLM4_9B_CHAT, **{**TINY, "hidden_size": 96, "num_attention_heads": 24}, head_dim=64,
        ), 12,
    ),
    "qwen3-eight-heads-128": (
        changed(
            QWEN3_17B,
            **{**TINY, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
            head_dim=128,
        ), 8,
    ),
    "qwen3-sixteen-heads-128": (
        changed(
            QWEN3_17B,
            **{
                **TINY, "hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 1,
            },
            head_dim=128,
        ), 16,
    ),
    "mistral-window-sixteen-heads-32": (
        changed(
            MISTRAL_7B,
            **{**TINY, "num_attention_heads": 32}, head_dim=32, sliding_window=75,
        ), 9,
    ),
}  # fmt: skip

# Families with maths that the kernel and prefill refuse.
REFUSED = {
    *("granite", "olmo2", "glm4", "gemma3", "gemma3_text"),
    "olmoe",
}
# Families that it runs in tests of their own; see `mixtures.py`.
MIXED = {"qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe"}


def gpu(num_sms: int, like: str = "sm_90a") -> Gpu:
    """A small one with the shared memory and registers of a typical one."""
    return replace(TYPICAL[like], num_sms=num_sms)


def configured(
    name: str, folder: Path, like: str = "sm_90a", ranks: int = 1
) -> tuple[ModelConfig, Plan]:
    """The model as its family reads it, and its plan."""
    values, num_sms = CASES[name]
    config = read_config(written(folder, values))
    return config, make_plan(config, Dtype.BF16, gpu(num_sms, like), ranks)


def mixed_model() -> ModelConfig:
    """Layers of three kinds, two of which take turns: biases, sizes of MLP and windows differ."""
    plain = Attention(4, 2, 32)
    biased = replace(plain, window=20, qkv_bias=True, output_bias=True)
    normed = replace(plain, qk_norm=True, output_bias=True, rope=False)
    narrow, wide = Layer(plain, Mlp(160)), Layer(biased, Mlp(1056, bias=True))
    return ModelConfig(
        family="llama", hidden_size=96, vocab_size=203, context_tokens=CONTEXT, norm_epsilon=1e-5,
        layers=(narrow, wide, narrow, wide, narrow, Layer(normed, Mlp(160))),
        rope=Rope(10_000.0), tied_head=False,
    )  # fmt: skip


def prompt(config: ModelConfig, num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (num_tokens,), generator=generator).tolist()


def reference_logits(
    config: ModelConfig, weights: Weights, ids: list[int], kv: KvFormat | None = None
) -> Tensor:
    """[T, V] in fp32, with keys and values stored so."""
    reference = build_reference(config, {k: v.float() for k, v in weights.items()}, kv)
    out = reference.forward(torch.tensor(ids), 0, reference.new_cache(len(ids)), "all")
    assert out is not None
    return out.clone()


def rope_table(config: ModelConfig, positions: int) -> Tensor:
    """[positions, D / 2, 2], as the decoder takes it."""
    head_dim = config.layers[0].attention.head_dim
    return elementwise.rope_table(config.rope, head_dim, positions, torch.device("cpu"))


def load(
    plan: Plan, weights: Weights, dtype: torch.dtype, rank: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(image, vectors, embedding) in `dtype`, absent weights as NaN, so that none is read."""
    parts = shard_all(plan.part_of(rank), weights)
    loaded = [_load_lane(plan, parts, dtype, place) for place in range(plan.shape.lanes_here)]
    images, vectors = zip(*loaded, strict=True)
    table = None if plan.share.tied_head else weights["embedding"].to(dtype)
    return torch.cat(images), torch.cat(vectors[: plan.shape.vector_lanes]), table


def _load_lane(
    plan: Plan, parts: Weights, dtype: torch.dtype, place_here: int
) -> tuple[Tensor, Tensor]:
    """(image, vectors) of a rank, or of one of its lanes."""
    layout = plan.image
    weights = {
        name: values
        if values.ndim == (1 if name.endswith(("norm", "bias", "correction", COLUMNS)) else 2)
        else values[place_here]
        for name, values in parts.items()
    }
    weights |= router_outputs(plan, weights, torch.device("cpu"), dtype)
    # In bytes all ones are NaN.
    rounds = _rounds(plan, dtype)
    image = torch.full((plan.blocks, layout.block_stride // (1 if rounds else 2)), torch.nan)
    image = torch.full_like(image, 255, dtype=torch.uint8) if rounds else image
    vectors = torch.full((layout.vector_values,), torch.nan)

    def put(layer: int, name: str, tensor: str) -> None:
        op = layout.operation(layer, name)
        own = {part: weights[tensor + part] for part in op.matrix.format.parts}
        if op.matrix.format.is_plain:
            own[""] = own[""].to(dtype)
        if op.matrix.format.is_permuted:
            words, start = table_of(op, own.pop(COLUMNS)), layout.table_offset(layer, name)
            vectors.view(torch.int32)[start : start + len(words)] = words
        place(plan, op, layer, pack(plan, op, own), image)

    for layer in range(plan.model.num_layers):
        kind = layout.layer(layer)
        biased = {f"{name}_bias": op.matrix for name, op in kind.operations.items()}
        for name in kind.in_blocks:
            put(layer, name, f"layers.{layer}.{name}")
        for name in kind.vectors:
            values = weights[f"layers.{layer}.{name}"].float()
            if name in biased:
                values = ordered(plan.shape, biased[name], values)
            start = layout.vector_offset(layer, name)
            vectors[start : start + values.numel()] = values.flatten()
    put(0, "head", "embedding" if plan.share.tied_head else "head")
    start, norm = layout.final_norm_offset, weights["final_norm"].float()
    vectors[start : start + norm.numel()] = norm
    return image, vectors


def _rounds(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether weights are bytes.

    Without rounding they are values in place of bytes, if any matrix's stand for themselves.
    """
    plain = any(op.matrix.format.is_plain for op in plan.operations)
    return dtype is not torch.float32 or not plain


def load_experts(plan: Plan, weights: Weights, dtype: torch.dtype, rank: int = 0) -> Tensor | None:
    """All experts of a rank as the kernel has them, or values in place of bytes."""
    if not plan.has_experts:
        return None
    parts = shard_all(plan.part_of(rank), weights)
    rounds = _rounds(plan, dtype)
    experts = torch.full((plan.image.experts_bytes // (1 if rounds else 2),), torch.nan)
    experts = torch.full_like(experts, 255, dtype=torch.uint8) if rounds else experts
    for layer in range(plan.model.num_layers):
        of_layer = plan.image.layer(layer).experts
        for number in range(of_layer.router.num_experts if of_layer else 0):
            at = f"layers.{layer}.experts.{number}."
            own = {}
            for name in OF_EXPERTS:
                stored = plan.image.operation(layer, name).matrix.format
                own[name] = {
                    part: parts[at + name + part].to(dtype if stored.is_plain else None)
                    for part in stored.parts
                }
            place_expert(plan, layer, number, own, experts)
    return experts


@dataclass(frozen=True)
class Launch:
    """All ranks of a launch."""

    ranks: list[Interpreter]

    def round(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """(logits [queries, V], chosen tokens)."""
        return round_of_ranks(self.ranks, tokens, sequences, positions)


@dataclass(frozen=True)
class LaneLaunch:
    """All lanes of a launch, in any order if there is one."""

    ranks: list[LaneInterpreter]
    order: random.Random | None = None

    def round(
        self, tokens: Sequence[int], sequences: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """(logits [queries, V], chosen tokens)."""
        return round_of_lanes(self.ranks, tokens, sequences, positions, self.order)


class Bench:
    """Weights and a pool in the kernel's layout; every `launch` has exchange buffers of its own.

    The pages of three sequences are scattered over the pool; all others hold NaN.
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, weights: Weights, dtype: torch.dtype | None = None
    ) -> None:
        self.plan, self._dtype = plan, dtype
        stored = torch.float32 if dtype is None else dtype
        per_sequence = CONTEXT // PAGE_POSITIONS
        pages = 3 * per_sequence + 2
        pools = [
            PagePool(
                config.num_layers,
                plan.shape.pool_kv_heads,
                plan.shape.head_dim,
                pages,
                stored,
                torch.device("cpu"),
                plan.kv,
            )
            for _ in range(plan.ranks)
        ]
        self.pools, self.pool = pools, pools[0]
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        self.unused = order[3 * per_sequence :]
        for pool in pools:
            # Codes have scales of no number there.
            pool.tensor[self.unused] = torch.nan if plan.kv is None else 255
        tables = order[: 3 * per_sequence].view(3, -1).int()
        rope = rope_table(config, CONTEXT)
        self._memories = [
            Memory(
                *load(plan, weights, stored, rank), rope, pool.tensor, tables,
                experts=load_experts(plan, weights, stored, rank),
            )
            for rank, pool in enumerate(pools)
        ]  # fmt: skip
        self.memory = self._memories[0]

    def launch(self, order: random.Random | None = None) -> "Launch | LaneLaunch":
        """A new launch over the same memory; `order` of lanes."""
        if self.plan.model.lanes is not None:
            return LaneLaunch(lanes_of_plan(self.plan, self._memories, self._dtype), order)
        ranks = [
            Interpreter(self.plan, memory, self._dtype, rank)
            for rank, memory in enumerate(self._memories)
        ]
        return Launch(ranks)

    def feed(self, ids: list[int], queries: int = 1, sequence: int = 0) -> Tensor:
        """Logits [T, V] of forced tokens, so many positions of a sequence side by side."""
        launch, out = self.launch(), []
        for start in range(0, len(ids), queries):
            part = ids[start : start + queries]
            positions = range(start, start + len(part))
            out.append(launch.round(part, [sequence] * len(part), positions)[0])
        return torch.cat(out)
