"""Plans of many shapes on every typical GPU fit it and leave nothing out."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from plan.shapes import (
    LANEFORMER,
    MIXTURE,
    PUBLIC,
    SHAPES,
    SMALL,
    all_operations,
    etude,
    everything,
    gpus,
    models,
    shaped,
)
from soloist.errors import GpuUnsupported, ShapeUnsupported
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.gpu import TYPICAL, Gpu, arch_from_capability, gpu_from_capability
from soloist.megakernel.header import Build, header
from soloist.megakernel.layout import ALIGNMENT, Buffer, stack
from soloist.megakernel.limits import CONSUMER_WARPS, LEAST_RING_SLOTS, MAX_QUERIES, THREADS
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.tile import SLOT_BYTES, TILE_ROWS
from soloist.model.config import Lanes, Layer, Mlp, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.rope import Rope

HOPPER = TYPICAL["sm_90a"]


def require_sound(plan: Plan) -> None:
    (kind,) = plan.image.kinds
    require_partition(plan)
    require_head_groups_full(plan)
    for queries in (1, MAX_QUERIES):
        for samples in (False, True):
            require_shared_memory(plan.with_room_for(queries, samples=samples))
    require_disjoint(list(plan.exchanges.workspace.values()), plan.exchanges.num_bytes)
    require_disjoint(list(kind.vectors.values()), kind.vector_values * 4)
    require_attention(plan)


def require_partition(plan: Plan) -> None:
    assert plan.shape.kv_heads <= plan.blocks <= plan.gpu.num_sms
    for op in all_operations(plan):
        assert op.matrix.blocks == plan.blocks
        assert op.matrix.units >= plan.blocks, "every block has rows of every matrix"
        assert 1 <= op.depth <= op.matrix.steps
    (kind,) = plan.image.kinds
    # Residual rows stay with their block.
    own = [[kind.operations[name].matrix.first_unit(b) for b in range(plan.blocks + 1)]
           for name in ("attention_output", "down")]  # fmt: skip
    assert own[0] == own[1]
    offsets = [kind.matrix_offset(name) for name in kind.operations]
    sizes = [op.matrix.max_block_bytes for op in kind.operations.values()]
    ends = pairwise([*offsets, kind.num_bytes])
    assert all(a + s == b for (a, b), s in zip(ends, sizes, strict=True))
    image = plan.image
    assert image.head_offset + plan.head.matrix.max_block_bytes <= image.block_stride
    assert image.block_stride // SLOT_BYTES % 2 == 1
    per_layer = sum(op.matrix.num_bytes for op in kind.operations.values())
    assert image.streamed_bytes == per_layer * plan.model.num_layers + plan.head.matrix.num_bytes
    assert image.streamed_bytes <= image.num_bytes


def require_head_groups_full(plan: Plan) -> None:
    matrix, group = plan.head.matrix, 2 * plan.head.group_tiles
    counts = {matrix.num_units(b) for b in range(plan.blocks)}
    assert counts == {matrix.max_units}
    assert matrix.max_units % group == 0
    assert matrix.units * 8 >= plan.model.vocab_size


def require_shared_memory(plan: Plan) -> None:
    assert plan.shared.ring_slots >= LEAST_RING_SLOTS
    # 1 KB is left for the barriers and what else the kernel declares.
    assert plan.shared.num_bytes <= plan.gpu.shared_bytes - 1024
    assert plan.shared.num_bytes + SLOT_BYTES > plan.gpu.shared_bytes - 1024, (
        "the ring takes the rest"
    )
    fixed = plan.shared.num_bytes - plan.shared.ring_slots * SLOT_BYTES
    require_disjoint(list(plan.shared.buffers.values()), fixed)
    several = plan.queries > 1 or plan.samples
    assert plan.shared.buffers["reduce"].num_bytes == plan.shared.reduce_bytes
    # The smallest piece in which all queries' rows meet must hold one tile.
    assert not several or plan.shared.reduce_bytes // 4 // CONSUMER_WARPS // MAX_QUERIES - 4 >= 16


def require_disjoint(buffers: list[Buffer], total_bytes: int) -> None:
    end = 0
    for buffer in buffers:
        assert buffer.offset == end
        assert buffer.offset % ALIGNMENT == 0
        end += buffer.num_bytes
    assert end == total_bytes


def require_attention(plan: Plan) -> None:
    attention = plan.attention
    assert attention.splits.bit_count() == 1, "a power of 2"
    assert plan.attention.splits * plan.shape.kv_heads <= plan.blocks
    assert attention.query_rows >= plan.shape.group
    assert attention.row_tiles * TILE_ROWS >= attention.queries_together * attention.query_rows
    room = plan.with_room_for(MAX_QUERIES, samples=False).shared.buffers["q_rows"].num_bytes
    assert room >= MAX_QUERIES * attention.query_rows * plan.shape.head_dim * 2
    assert (
        plan.attention.softmax_lanes * plan.attention.row_tiles
        == CONSUMER_WARPS * plan.attention.warp_tiles
    )
    assert plan.attention.unsplit_positions % PAGE_POSITIONS == 0
    pieces = 4 if plan.attention.page_slot else 2
    assert pieces * plan.kv_layout.half_page_bytes <= SLOT_BYTES


@settings(max_examples=60, deadline=None)
@given(models(), gpus())
def test_small_models_on_every_gpu(model: ModelConfig, gpu: Gpu) -> None:
    try:
        plan = make_plan(model, Dtype.BF16, gpu)
    except ShapeUnsupported as refusal:
        # One narrow matrix leaves few blocks, which own more of a wide one than registers hold.
        given, allowed = re.findall(r"(\d+) rows of|at most (\d+)", refusal.message)
        assert int(given[0]) > int(allowed[1])
        return
    require_sound(plan)


@pytest.mark.parametrize("gpu", TYPICAL.values(), ids=TYPICAL)
@pytest.mark.parametrize("name", [*PUBLIC, "etude", "small"])
def test_public_models_on_every_gpu(name: str, gpu: Gpu) -> None:
    plan = make_plan(everything()[name], Dtype.BF16, gpu)
    require_sound(plan)
    busiest = max(plan.image.block_bytes(b) for b in range(plan.blocks)) * plan.blocks
    assert busiest <= (1.12 if name in PUBLIC else 1.5) * plan.image.streamed_bytes
    values = sum(
        op.matrix.rows * op.matrix.columns for op in plan.image.kinds[0].operations.values()
    )
    values = values * plan.model.num_layers + plan.model.vocab_size * plan.model.hidden_size
    if name in PUBLIC:
        assert plan.image.streamed_bytes < 1.03 * 2 * values, "padding is no burden"


def test_blocks_are_chosen_to_waste_least() -> None:
    gpu = TYPICAL["sm_90a"]
    model = PUBLIC["llama-3.1-8b"]
    plan = make_plan(model, Dtype.BF16, gpu)

    def cost(blocks: int) -> int:
        other = Plan(model, Dtype.BF16, gpu, blocks)
        return blocks * other.image.max_block_bytes

    assert cost(plan.blocks) == min(map(cost, range(119, 133)))


@pytest.mark.parametrize("num_sms", [2, 3, 7, 12])
def test_few_sms(num_sms: int) -> None:
    require_sound(make_plan(SMALL, Dtype.FP16, replace(TYPICAL["sm_90a"], num_sms=num_sms)))


@pytest.mark.parametrize("gpu", TYPICAL.values(), ids=TYPICAL)
@pytest.mark.parametrize("name", [*SHAPES, *PUBLIC])
def test_sums_fit_the_registers(name: str, gpu: Gpu) -> None:
    model = read_config(SHAPES[name]) if name in SHAPES else PUBLIC[name]
    plan = make_plan(model, Dtype.BF16, gpu)
    (kind,) = plan.image.kinds
    most, gate_up = kind.spread.most_tiles, kind.operations["gate_up"]
    for op in kind.operations.values():
        assert op.group_tiles <= most
        if op is not gate_up:
            assert op.group_tiles == op.matrix.max_tiles, "one group"
    groups = -(-gate_up.matrix.max_tiles // gate_up.group_tiles)
    assert (groups - 1) * most < gate_up.matrix.max_tiles, "no group too many"


def test_registers_are_moved_where_they_can_be() -> None:
    movable, plain = (TYPICAL[arch].architecture for arch in ("sm_90a", "sm_80"))
    assert movable.moves_registers
    assert not plain.moves_registers
    for gpu in (movable, plain):
        helpers = THREADS // 32 - CONSUMER_WARPS
        warps = CONSUMER_WARPS * gpu.consumer_registers + helpers * gpu.helper_registers
        assert warps == THREADS // 32 * plain.consumer_registers
        assert warps * 32 <= 64 * 1024
        assert gpu.consumer_registers % 8 == gpu.helper_registers % 8 == 0, "as setmaxnreg wants"


def test_the_smallest_ring() -> None:
    plan = make_plan(SMALL, Dtype.BF16, TYPICAL["sm_86"])
    rest = plan.shared.num_bytes - plan.shared.ring_slots * SLOT_BYTES + 1024
    least = replace(plan.gpu, shared_bytes=rest + LEAST_RING_SLOTS * SLOT_BYTES)
    assert make_plan(SMALL, Dtype.BF16, least).shared.ring_slots == LEAST_RING_SLOTS
    short = replace(least, shared_bytes=least.shared_bytes - 1)
    with pytest.raises(ShapeUnsupported) as refused:
        make_plan(SMALL, Dtype.BF16, short)
    assert f"{short.shared_bytes:,} bytes of shared memory a block" in refused.value.message
    assert f"(allowed: {least.shared_bytes:,} and more)" in refused.value.message


def test_more_rows_than_registers_are_refused() -> None:
    many_heads = shaped((64, 96, 1, 8, 1, 128, 99))  # 1,280 rows of q, k and v on 8 blocks at most
    make_plan(many_heads, Dtype.BF16, TYPICAL["sm_86"])
    with pytest.raises(ShapeUnsupported, match="640 rows of qkv in one of 2 blocks"):
        make_plan(many_heads, Dtype.BF16, replace(TYPICAL["sm_86"], num_sms=2))


LANES = Lanes(
    8, 2, early_sum=True, attention_comm=True, mlp_comm=True, shared_norm_scales=True,
    head="replicate", sum_before_norm=False,
)  # fmt: skip


def mixed(model: ModelConfig, change: dict[str, Any]) -> ModelConfig:
    first, *rest = model.layers
    other = replace(first.attention, **change)
    return replace(model, layers=(first, *rest[:-1], Layer(other, first.mlp)))


REFUSED: dict[str, tuple[ModelConfig, Dtype, str, str]] = {
    "lanes": (
        replace(SMALL, lanes=replace(LANES, num_lanes=2, head="lane")), Dtype.BF16,
        "an LM head over all lanes side by side", "'replicate'",
    ),
    "embeddings": (
        replace(SMALL, embedding_scale=2.0), Dtype.BF16, "a scale of embeddings", "as they are",
    ),
    "logits": (replace(SMALL, logit_scale=2.0), Dtype.BF16, "a scale of logits", "as the head"),
    "norms": (replace(SMALL, norm_offset=1.0), Dtype.BF16, "norms that are stored less 1", "as"),
    "joint norms": (
        mixed(SMALL, {"qk_norm": True, "qk_norm_joins_heads": True}), Dtype.BF16,
        "norms over all heads of queries and keys", "norms of each head",
    ),
    "scores": (
        mixed(SMALL, {"own_scale": 0.5}), Dtype.BF16, "attention scores times 0.5", "0.176777",
    ),
    "two ropes": (
        mixed(SMALL, {"own_rope": Rope(500.0)}), Dtype.BF16, "layers with a rope of their own",
        "one for all layers",
    ),
    "outputs": (
        replace(SMALL, layers=(replace(SMALL.layers[0], norms_outputs=True),)), Dtype.BF16,
        "norms after attention and MLP", "norms before them",
    ),
    "inputs": (
        replace(SMALL, layers=(replace(SMALL.layers[0], norms_inputs=False),)), Dtype.BF16,
        "layers without norms before attention and MLP", "such norms",
    ),
    "activation": (
        replace(SMALL, layers=(replace(SMALL.layers[0], mlp=Mlp(96, activation="gelu_tanh")),)),
        Dtype.BF16, "the activation gelu_tanh", "silu",
    ),
    "fp32": (SMALL, Dtype.FP32, "fp32 weights", "bf16 or fp16"),
    "head_dim": (shaped((64, 96, 1, 4, 2, 48, 99)), Dtype.BF16, "head_dim 48", "32, 64, 96, 128"),
    "group": (shaped((64, 96, 1, 34, 2, 32, 99)), Dtype.BF16, "17 query heads", "at most 16"),
    "hidden": (shaped((60, 96, 1, 4, 2, 32, 99)), Dtype.BF16, "hidden_size 60", "multiple of 8"),
    "ffn": (shaped((64, 92, 1, 4, 2, 32, 99)), Dtype.BF16, "intermediate_size 92", "multiple of 8"),
    "kv heads": (shaped((64, 96, 1, 9, 9, 32, 99)), Dtype.BF16, "9 KV heads", "at most 8"),
    "mlp of lanes": (
        replace(
            SMALL, lanes=LANES, layers=(SMALL.layers[0], replace(SMALL.layers[0], mlp=Mlp(104)))
        ),
        Dtype.BF16, "layers of different shapes in a model with lanes", "window and rope only",
    ),
    **{
        f"layers differ in {field}": (
            mixed(SMALL, {field: value}), Dtype.BF16,
            "layers with other heads than the first", "biases, norms of queries and keys, MLP",
        )
        for field, value in (
            ("num_query_heads", 2), ("num_kv_heads", 4), ("head_dim", 64),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    model, dtype, given_, allowed = REFUSED[name]
    with pytest.raises(ShapeUnsupported) as refused:
        make_plan(model, dtype, TYPICAL["sm_90a"])
    assert f"does not support {given_}" in refused.value.message
    assert refused.value.message.endswith(")")
    assert allowed in refused.value.message.split("(allowed: ")[1]


def test_layers_may_differ_in_window_and_rope() -> None:
    model = mixed(SMALL, {"window": 16, "rope": False})
    assert len(make_plan(model, Dtype.BF16, TYPICAL["sm_90a"]).image.kinds) == 1


def test_the_description_names_what_matters() -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"])
    text = plan.describe()
    assert text.splitlines()[0].startswith("qwen3")
    for fact in (
        "sm_90a", f"{plan.blocks} of 132 SMs", f"ring {plan.shared.ring_slots} x 16 KB",
        f"{plan.shared.num_bytes:,} bytes", f"up to {plan.attention.splits} splits",
        f"{plan.attention.softmax_lanes} softmax lanes",
        f"{plan.image.streamed_bytes / 1e9:.3f} GB",
    ):  # fmt: skip
        assert fact in text
    for op, line in zip(all_operations(plan), text.splitlines()[2:], strict=True):
        m = op.matrix
        assert line.split()[:5] == [m.name, f"{m.rows:,}", "x", f"{m.columns:,}", str(m.order)]
        assert f"{m.steps} steps" in line


def test_buffers_are_stacked_on_cache_lines() -> None:
    buffers = stack({"a": (3, 5), "b": (), "c": (64,)}, value_bytes=2)
    assert [b.offset for b in buffers.values()] == [0, 128, 256]
    assert [b.num_bytes for b in buffers.values()] == [128, 128, 128]


@pytest.mark.parametrize("arch", TYPICAL)
def test_gpus_are_named_as_the_compiler_names_them(arch: str) -> None:
    gpu = TYPICAL[arch]
    digits = arch.removeprefix("sm_").removesuffix("a")
    capability = (int(digits[:-1]), int(digits[-1]))
    assert gpu_from_capability(*capability, gpu.num_sms, gpu.shared_bytes) == gpu


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 7), "sm_87"), ((9, 0), "sm_90a"), ((10, 3), "sm_103a"), ((12, 1), "sm_121a")],
)
def test_other_chips_of_a_generation(capability: tuple[int, int], arch: str) -> None:
    assert arch_from_capability(*capability) == arch


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_older_gpus_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(GpuUnsupported, match=r"8\.0 and later"):
        gpu_from_capability(*capability, 68, 64 * 1024)


@pytest.mark.parametrize(
    ("name", "ranks", "copies", "of_head", "fetched"),
    [
        ("llama-3.2-1b", 1, (3, 3, 3), 3, 0), ("llama-3.2-1b", 2, (2, 2, 3), 3, 0),
        ("llama-3.2-1b", 4, (2, 2, 3), 3, 8), ("laneformer-2b-as-llama", 1, (3, 3, 3), 3, 0),
        ("laneformer-2b-as-llama", 2, (2, 3, 4), 4, 0),
        ("laneformer-2b-as-llama", 8, (2, 2, 3), 3, 0), ("llama-3.1-8b", 4, (2, 2, 3), 3, 0),
        ("laneformer-2b", 4, (2, 3, 4), 4, 0), ("laneformer-2b", 8, (2, 2, 3), 3, 0),
    ],
)  # fmt: skip
def test_blocks_that_stream_little_keep_the_memory_free_for_exchanges(
    name: str, ranks: int, copies: tuple[int, int, int], of_head: int, fetched: int
) -> None:
    model = PUBLIC.get(name) or read_config(LANEFORMER)
    plan = make_plan(model, Dtype.BF16, TYPICAL["sm_90a"], ranks)
    assert plan.copies_in_flight == copies
    assert plan.head_copies_in_flight == of_head
    assert plan.fetch_slots == fetched


@pytest.mark.parametrize(("ranks", "layers"), [(1, 1), (2, 4), (4, 4)])
def test_ranks_let_a_block_attend_for_some_layers_on_end(ranks: int, layers: int) -> None:
    plan = make_plan(PUBLIC["llama-3.1-8b"], Dtype.BF16, TYPICAL["sm_90a"], ranks)
    assert f"kRotationLayers = {layers}u;" in header(plan)


def test_only_gpus_that_can_bring_weights_to_the_l2_are_asked_to() -> None:
    model = PUBLIC["llama-3.2-1b"]
    assert make_plan(model, Dtype.BF16, TYPICAL["sm_90a"], 4).fetch_slots > 0
    assert make_plan(model, Dtype.BF16, TYPICAL["sm_89"], 4).fetch_slots == 0


def slots(plan: Plan) -> int:
    return plan.shared.ring_slots


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_one_greedy_query_leaves_the_ring_more_room(name: str, ranks: int) -> None:
    plan = make_plan(PUBLIC[name], Dtype.BF16, TYPICAL["sm_90a"], ranks)
    single = plan.with_room_for(1, samples=False)
    assert slots(single) >= slots(plan.with_room_for(1, samples=True)) >= slots(plan)
    assert ranks == 1 or slots(single) == 13
    # Two reductions side by side, of all rows of a group, and the softmax lanes' results.
    rows = max(op.group_tiles for op in plan.operations) * TILE_ROWS
    assert single.shared.reduce_bytes // 2 >= CONSUMER_WARPS * rows * 4
    values = plan.attention.softmax_lanes * plan.shape.group * plan.shape.head_dim
    assert single.shared.reduce_bytes >= values * 4


def test_attention_blocks_are_a_mixtures_on_sms_without_weights() -> None:
    mixture = read_config(MIXTURE)

    def blocks(model: ModelConfig = mixture, *, ranks: int = 1, gpu: Gpu = HOPPER) -> int:
        plan = make_plan(model, Dtype.BF16, gpu, ranks)
        assert {"outcome", "left"} <= plan.exchanges.workspace.keys() or not plan.attention_blocks
        return plan.attention_blocks

    first, *others = mixture.layers
    windowed = replace(first, attention=replace(first.attention, window=128))
    assert blocks() == 4, "one for each KV head"
    assert blocks(gpu=replace(HOPPER, num_sms=131)) == 0, "three are left beside 128"
    assert blocks(replace(mixture, layers=(windowed, *others))) == 0, "it is never split"
    assert [blocks(ranks=n) for n in (2, 4)] == [2, 1], "of each rank"
    assert blocks(etude()) == 0
    assert blocks(gpu=TYPICAL["sm_80"]) == 0


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (Build(queries=1), 4),
        (Build(queries=1, samples=True), 4),
        (Build(queries=1, drafts=True), 0),
        (Build(queries=MAX_QUERIES), 0),
    ],
)
def test_attention_blocks_serve_one_query(build: Build, count: int) -> None:
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, HOPPER)
    assert f"kAttentionBlocks = {count}u;" in header(plan, build)
    assert "kNumBlocks = 128u;" in header(plan, build), "those with weights"
