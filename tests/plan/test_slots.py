"""Tiles of fewer bits share a slot of the ring: producer and consumers cut the stream alike."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreter.mixtures import with_shared_mlp
from interpreter.quantised import FORMATS, alike, formats_of
from plan.shapes import MIXTURE as MIXTURE_SHAPE
from plan.shapes import PUBLIC, SHAPES, SMALL, etude
from soloist.errors import ShapeUnsupported
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.layer_kind import CONVERTED_STEPS, Operation
from soloist.megakernel.limits import LEAST_RING_SLOTS, MAX_QUERIES
from soloist.megakernel.partition import Matrix, RowOrder
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.sampling_header import SAMPLE_SHARED_BYTES
from soloist.megakernel.tile import SLOT_BYTES
from soloist.megakernel.weight_format import BF16, quantized_format
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config

MIXTURE = read_config(MIXTURE_SHAPE)
KINDS = {kind: quantized_format(stored) for kind, stored in FORMATS.items()}


def turn(halves: int, depth: int) -> Iterator[tuple[int, bool]]:
    """(step, whether both steps' 8 rows) of each tile of a turn: TileOrder in multiply.cuh."""
    for first in range(0, depth, 2):
        steps = range(first, min(first + 2, depth))
        yield from ((step, False) for step in steps for _ in range(halves // 2))
        if halves % 2:
            yield first, True


def depths(op: Operation) -> list[int]:
    """Steps of a turn in builds for one query, and for several."""
    return [op.depth, *(op.depth_for(8, fewer) for fewer in (2, 4))]


def taken(op: Operation, units: int, depth: int) -> Iterator[tuple[int, int, int]]:
    """(slot, tile in the slot, half tiles that are there) in the order of the consumers."""
    halves, most, slot = units * op.matrix.unit_half_tiles, 2 * op.group_tiles, -1
    steps, slot_tiles = op.matrix.steps, op.slot_tiles
    for start in range(0, halves, most):
        group = min(most, halves - start)
        for first in range(0, steps, depth):
            # The last turn of 16-bit weights skips steps; of others it has code of its own.
            most_steps = depth if op.matrix.format.is_plain else min(depth, steps - first)
            for i, (step, left_over) in enumerate(turn(group, most_steps)):
                if first + step >= steps:
                    continue
                slot += i % slot_tiles == 0
                is_lone = left_over and (step + 1 == most_steps or first + step + 1 == steps)
                yield slot, i % slot_tiles, 1 if is_lone else 2


def require_same_slots(op: Operation) -> None:
    """Every tile lies where the stream of all half tiles, one after the other, has it."""
    fewest, slot_half_tiles = op.matrix.units // op.matrix.blocks, 2 * op.slot_tiles
    for units, depth in product({fewest, op.matrix.max_units} - {0}, depths(op)):
        at = 0
        for slot, tile, half_tiles in taken(op, units, depth):
            assert divmod(at, slot_half_tiles) == (slot, 2 * tile), op
            at += half_tiles
        assert at == units * op.matrix.unit_half_tiles * op.matrix.steps


def require_depth(op: Operation) -> None:
    assert 1 <= op.slot_tiles <= op.matrix.format.tiles
    for depth in depths(op):
        if depth < op.matrix.steps:
            assert depth % 2 == 0 or not op.matrix.shares_slots
            whole = depth % CONVERTED_STEPS[0] == 0 or CONVERTED_STEPS[0] % depth == 0
            assert whole or not op.matrix.format.is_integer


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 60), columns=st.integers(1, 40), blocks=st.integers(1, 3),
    order=st.sampled_from([RowOrder.NATURAL, RowOrder.PAIRED]),
    group_tiles=st.integers(1, 24), arch=st.sampled_from(sorted(TYPICAL)),
    kind=st.sampled_from([None, *KINDS]),
)  # fmt: skip
def test_consumers_find_every_tile(
    rows: int, columns: int, blocks: int, order: RowOrder, group_tiles: int, arch: str,
    kind: str | None,
) -> None:  # fmt: skip
    """Any matrix, also in groups of tiles."""
    stored = KINDS[kind] if kind else BF16
    matrix = Matrix("any", 16 * rows, 512 * columns - 64, order, min(blocks, rows), stored)
    op = Operation(matrix, group_tiles, TYPICAL[arch])
    require_depth(op)
    require_same_slots(op)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("steps", [3, 5, 8, 9, 37])
@pytest.mark.parametrize("halves", [1, 2, 3, 7, 9, 16])
def test_rows_left_over_in_an_odd_number_of_steps(halves: int, steps: int, kind: str) -> None:
    """They end in half a tile, and the slots before it are full."""
    for blocks in (1, 2):
        units = halves * blocks - (blocks - 1)
        matrix = Matrix("any", 8 * units, 512 * steps, RowOrder.NATURAL, blocks, KINDS[kind])
        for group_tiles in {-(-halves // 2), -(-halves // 4)}:
            require_same_slots(Operation(matrix, group_tiles, TYPICAL["sm_90a"]))


@cache
def model(name: str) -> ModelConfig:
    if name == "etude":
        return etude()
    config = read_config(SHAPES[name]) if name in SHAPES else PUBLIC[name]
    return replace(config, tied_head=False)


def planned(name: str, kind: str | None, arch: str, ranks: int = 1) -> Plan:
    config = model(name)
    formats = formats_of(alike(config, kind)) if kind else None
    return make_plan(config, Dtype.BF16, TYPICAL[arch], ranks, formats)


@pytest.mark.parametrize("arch", TYPICAL)
@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "int8", "fp8-block"])
@pytest.mark.parametrize("name", list(dict.fromkeys([*PUBLIC, *SHAPES])))
def test_shared_memory_of_public_models(name: str, kind: str, arch: str) -> None:
    try:
        plan = planned(name, kind, arch)
    except ShapeUnsupported as refused:
        pytest.fail(refused.message)
    for queries, samples in ((1, False), (8, True)):
        shared = plan.with_room_for(queries, samples=samples).shared
        most = max(SLOT_BYTES, *(op.slot_bytes for op in plan.operations))
        assert most <= shared.slot_bytes < most + 128
        assert shared.slot_bytes % 128 == 0
        assert shared.ring_slots >= LEAST_RING_SLOTS
        assert shared.num_bytes <= plan.gpu.shared_bytes - 1024
        assert shared.num_bytes + shared.slot_bytes > plan.gpu.shared_bytes - 1024
        converts = queries == 1
        assert ("converted" in shared.buffers) == converts
    for op in plan.operations:
        require_depth(op)
        require_same_slots(op)


def test_slots_have_as_many_tiles_as_there_is_room_for() -> None:
    """Of a model whose blocks have whole slots; scales and zeros make a slot larger."""
    plans = {kind: planned("llama-3.1-8b", kind, "sm_90a") for kind in ("int4", "int8", "fp8")}
    tiles = {kind: {op.slot_tiles for op in plan.operations} for kind, plan in plans.items()}
    assert {kind: max(found) for kind, found in tiles.items()} == {"int4": 4, "int8": 2, "fp8": 2}
    for kind, plan in plans.items():
        half = plan.head.matrix.format.half_tile_bytes
        assert plan.shared.slot_bytes == -(-max(tiles[kind]) * 2 * half // 128) * 128
        assert SLOT_BYTES < plan.shared.slot_bytes < 1.05 * SLOT_BYTES


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("name", list(dict.fromkeys([*PUBLIC, *SHAPES])))
def test_one_query_shares_the_room_for_its_activations(name: str, kind: str, samples: bool) -> None:
    """Attention lies in it, at other times, and reductions at either end of their buffer."""
    plan = planned(name, kind, "sm_90a").with_room_for(1, samples=samples)
    shared, buffers = plan.shared, plan.shared.buffers
    converted, of_attention = buffers["converted"], (buffers["q_rows"], buffers["stats"])
    attended = shared.attention.softmax_lanes * plan.shape.group * plan.shape.head_dim * 4
    assert of_attention[0].offset >= max(converted.offset, attended)
    assert of_attention[0].offset + of_attention[0].num_bytes <= of_attention[1].offset
    assert of_attention[1].offset + of_attention[1].num_bytes <= (
        converted.offset + converted.num_bytes
    )
    assert converted.num_bytes >= shared.converted_bytes
    rest = [b for n, b in buffers.items() if n not in ("q_rows", "stats")]
    ends = [(b.offset, b.offset + b.num_bytes) for b in sorted(rest, key=lambda b: b.offset)]
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    if samples:
        assert shared.reduce_bytes + converted.num_bytes >= SAMPLE_SHARED_BYTES
    order = [op for kind in plan.image.kinds for op in kind.operations.values()]
    for one, other in [*pairwise([*order, order[0], plan.head, plan.head, order[0]])]:
        assert sum(8 * 4 * (-(-op.group_tiles // 2) * 32) for op in (one, other)) <= (
            shared.reduce_bytes
        ), (one.matrix.name, other.matrix.name)


@pytest.mark.parametrize("samples", [False, True])
def test_few_converted_steps_make_room_for_a_slot(samples: bool) -> None:
    """Where steps are converted by fours anyway, and all of them where it makes no difference."""

    def found(name: str, kind: str) -> tuple[int, int, set[int]]:
        plan = planned(name, kind, "sm_90a").with_room_for(1, samples=samples)
        at_once = {op.steps_at_once for op in plan.operations if not op.matrix.format.is_plain}
        return plan.shared.ring_slots, plan.shared.converted_steps, at_once

    assert found("llama-3.1-8b", "fp8") == (13, 4, {4})
    assert found("llama-3.1-8b", "int4") == (12, 16, {16})
    # One tile in a block of attention_output and of down.
    assert found("qwen3-1.7b", "fp8") == (12, 16, {4, 16})


@pytest.mark.parametrize("arch", TYPICAL)
@pytest.mark.parametrize("name", list(dict.fromkeys([*PUBLIC, *SHAPES])))
def test_what_is_no_slot_is_room_for_several_queries_reductions(name: str, arch: str) -> None:
    """As far as they need it; the ring has as many slots, and static variables their room."""
    plan = planned(name, "int4", arch).with_room_for(MAX_QUERIES, samples=False)
    shared, wide = plan.shared, plan.shared.wide_reduce_bytes
    largest = max(8 * 4 * MAX_QUERIES * (-(-op.group_tiles // 2) * 32) for op in plan.operations)
    spare = plan.gpu.shared_bytes - shared.num_bytes
    assert spare >= 1152
    longer = replace(shared, shortens_reductions=False)
    if shared.ring_slots == longer.ring_slots:
        assert shared.reduce_bytes >= 16 * 1024
    else:
        assert shared.shortens_reductions
        assert shared.ring_slots == longer.ring_slots + 1
        # Each warp has 32 rows of each query, and softmaxes of a query lie there.
        softmaxes = shared.attention.softmax_lanes * shared.shape.group
        assert shared.reduce_bytes >= max(8 * 1024, softmaxes * shared.shape.head_dim * 4)
    if shared.reduce_bytes > 16 * 1024:
        assert wide <= largest
    assert wide >= largest or spare < 1152 + 128


@pytest.mark.parametrize(
    ("kind", "samples", "slots", "tiles"),
    [("int4", False, 12, 5), ("int4", True, 11, 9), ("fp8", False, 11, 10)],
)
def test_llama_8b_adds_up_less_at_once_for_a_slot_more(
    kind: str, samples: bool, slots: int, tiles: int
) -> None:
    """With eight queries of 4 bits; choosing tokens takes room that leaves none for a slot."""
    plan = planned("llama-3.1-8b", kind, "sm_90a").with_room_for(MAX_QUERIES, samples=samples)
    (gate_up,) = {op for op in plan.operations if op.matrix.name == "gate_up"}
    assert gate_up.group_tiles == 14
    assert plan.shared.ring_slots == slots
    assert plan.shared.wide_reduce_bytes // (8 * 512) == tiles


def test_models_of_the_readme_have_a_slot_more_with_one_query() -> None:
    for name in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama"):
        for kind in ("int4", "fp8"):
            plan = planned(name, kind, "sm_90a")
            slots = {plan.with_room_for(1, samples=s).shared.ring_slots for s in (False, True)}
            longer = kind == "fp8" and name in {"llama-3.1-8b", "laneformer-2b-as-llama"}
            assert slots == {13 if longer else 12}, (name, kind)


@pytest.mark.parametrize(("name", "fewer"), [("qwen3-1.7b", 4), ("llama-3.1-8b", 2)])
def test_several_queries_have_shorter_turns(name: str, fewer: int) -> None:
    """Their activations wait in registers; with one query there are few of them."""
    for kind in ("int4", "fp8"):
        plan = planned(name, kind, "sm_90a")
        ops = {op.matrix.name: op for op in plan.operations}
        assert plan.depth_of(ops["down"], 1) == 2 * fewer
        assert plan.depth_of(ops["down"], 8) == fewer
        assert plan.depth_of(ops["head"], 8) == ops["head"].depth


def test_16_bits_keep_their_slots() -> None:
    for name in PUBLIC:
        plan = make_plan(PUBLIC[name], Dtype.BF16, TYPICAL["sm_90a"])
        assert {op.slot_tiles for op in plan.operations} == {1}
        assert plan.shared.slot_bytes == SLOT_BYTES
        assert "converted" not in plan.shared.buffers


def test_copies_of_quantised_weights_pause_where_blocks_stream_much() -> None:
    """On one GPU. Ranks ask by how much of the ring is free."""
    plain = make_plan(model("llama-3.1-8b"), Dtype.BF16, TYPICAL["sm_90a"])
    assert (plain.waiting_copies_in_flight, plain.copies_in_flight) == (0, (3, 3, 3))
    much = planned("llama-3.1-8b", "int4", "sm_90a").with_room_for(1, samples=False)
    assert (much.waiting_copies_in_flight, much.copies_in_flight) == (2, (3, 3, 3))
    assert (much.head_copies_in_flight, much.quantized_batch_slots) == (3, 1)
    slow = planned("llama-3.1-8b", "super-mixed", "sm_90a")
    assert (slow.waiting_copies_in_flight, slow.copies_in_flight) == (2, (4, 4, 4))
    more = planned("llama-3.1-8b", "fp8", "sm_90a")
    assert (more.waiting_copies_in_flight, more.copies_in_flight) == (0, (3, 3, 3))
    ranks = make_plan(
        model("llama-3.1-8b"), Dtype.BF16, TYPICAL["sm_90a"], ranks=2,
        formats=formats_of(alike(model("llama-3.1-8b"), "int4")),
    )  # fmt: skip
    assert (ranks.waiting_copies_in_flight, ranks.copies_in_flight[0]) == (0, 2)
    assert ranks.quantized_batch_slots == 1


def test_one_query_of_four_bits_has_one_copy_while_blocks_of_small_layers_wait() -> None:
    """On Hopper. Small layers have two copies else."""
    config = replace(SMALL, tied_head=False)
    little = {
        kind: make_plan(
            config, Dtype.BF16, TYPICAL["sm_90a"],
            formats=formats_of(alike(config, kind)) if kind else None,
        ).with_room_for(1, samples=False)
        for kind in (None, "int4", "int8", "fp8")
    }  # fmt: skip
    assert {p.copies_in_flight for p in little.values()} == {(2, 2, 2)}
    assert {k: p.waiting_copies_in_flight for k, p in little.items()} == {
        None: 0, "int4": 1, "int8": 0, "fp8": 0,
    }  # fmt: skip
    assert {plan.quantized_batch_slots for plan in little.values()} == {2}
    several = little["int4"].with_room_for(MAX_QUERIES, samples=False)
    assert (several.waiting_copies_in_flight, several.copies_in_flight) == (0, (2, 2, 2))
    elsewhere = make_plan(
        config, Dtype.BF16, TYPICAL["sm_89"], formats=formats_of(alike(config, "int4"))
    )
    assert elsewhere.with_room_for(1, samples=False).waiting_copies_in_flight == 0


def test_several_queries_of_four_bits_have_two_copies() -> None:
    """Of 8 bits, for which multiplies do not take longer than the memory, as many as one query."""
    for kind, copies in (("int4", 2), ("int8", 3), ("fp8", 3)):
        plan = planned("llama-3.1-8b", kind, "sm_90a").with_room_for(MAX_QUERIES, samples=False)
        assert (plan.waiting_copies_in_flight, plan.copies_in_flight) == (0, (copies,) * 3)
        assert plan.head_copies_in_flight == 3


def test_several_queries_of_four_bits_leave_memory_and_l2_to_who_attends() -> None:
    """Slots are expected early, more of them hold pages, and blocks of large layers rest."""

    def planned_for(name: str, kind: str, arch: str = "sm_90a", queries: int = MAX_QUERIES) -> Plan:
        return planned(name, kind, arch).with_room_for(queries, samples=False)

    def choices(plan: Plan) -> tuple[bool, int, int]:
        return plan.expects_early, plan.page_batch_slots, plan.rest_cycles

    large, little = planned_for("llama-3.1-8b", "int4"), planned_for("llama-3.2-1b", "int4")
    assert (large.shared.ring_slots, little.shared.ring_slots) == (12, 12)
    assert choices(large) == (True, 8, 7000)
    assert choices(little) == (True, 8, 0)
    (output,) = {
        kind.operations["attention_output"].matrix.max_block_bytes for kind in large.image.kinds
    }
    assert output <= (12 - 8) * large.shared.slot_bytes
    others = [
        planned_for("llama-3.1-8b", "int4", queries=1),
        planned_for("llama-3.1-8b", "int8"),
        planned_for("llama-3.1-8b", "int4", "sm_89"),
    ]
    for plan in others:
        assert choices(plan) == (False, plan.shared.ring_slots // 2, 0)


def test_several_queries_of_four_bits_have_a_way_for_one_querys_rows() -> None:
    """With heads of 128 values, and no experts: others lose by it, or nobody has timed them."""

    def has_way(name: str, kind: str, arch: str = "sm_90a", queries: int = MAX_QUERIES) -> bool:
        plan = planned(name, kind, arch).with_room_for(queries, samples=False)
        return plan.has_way_for_few

    assert has_way("llama-3.1-8b", "int4")
    assert has_way("qwen3-1.7b", "int4")
    assert not has_way("laneformer-2b-as-llama", "int4")
    assert not has_way("llama-3.2-1b", "int4")
    assert not has_way("llama-3.1-8b", "int4", queries=1)
    assert not has_way("llama-3.1-8b", "int8")
    assert not has_way("llama-3.1-8b", "int4", "sm_89")
    heads = [replace(x, attention=replace(x.attention, head_dim=128)) for x in MIXTURE.layers]
    mixture = of_experts("int4", replace(MIXTURE, layers=tuple(heads)))
    assert not mixture.with_room_for(MAX_QUERIES, samples=False).has_way_for_few


def test_an_elected_lane_asks_for_copies_of_eight_bits_and_of_several_queries_of_four() -> None:
    """Not where a mixture loses by it, nor in builds that nobody has tested with it."""

    def elects(
        name: str, kind: str | None, arch: str = "sm_90a", queries: int = 1, ranks: int = 1
    ) -> bool:
        plan = planned(name, kind, arch, ranks).with_room_for(queries, samples=False)
        return plan.elects_lane

    for kind in ("fp8", "int8"):
        assert elects("llama-3.1-8b", kind)
        assert elects("llama-3.1-8b", kind, queries=MAX_QUERIES)
        assert not elects("llama-3.1-8b", kind, ranks=2)
        assert not elects("llama-3.1-8b", kind, "sm_89")
        assert not of_experts(kind).elects_lane
    assert elects("llama-3.1-8b", "int4", queries=MAX_QUERIES)
    assert not elects("llama-3.1-8b", "int4")
    assert not elects("llama-3.1-8b", "int4", queries=MAX_QUERIES, ranks=2)
    assert not elects("llama-3.1-8b", None)
    assert not of_experts("int4").with_room_for(MAX_QUERIES, samples=False).elects_lane


def of_experts(kind: str, config: ModelConfig = MIXTURE) -> Plan:
    formats = formats_of(alike(config, kind))
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], formats=formats)
    return plan.with_room_for(1, samples=False)


def test_copies_of_experts_pause_while_blocks_wait() -> None:
    plain = make_plan(MIXTURE, Dtype.BF16, TYPICAL["sm_90a"]).with_room_for(1, samples=False)
    assert (plain.waiting_copies_in_flight, plain.copies_in_flight) == (2, (4, 4, 4))
    ranks = make_plan(MIXTURE, Dtype.BF16, TYPICAL["sm_90a"], ranks=2)
    two = ranks.with_room_for(1, samples=False)
    assert (two.waiting_copies_in_flight, two.copies_in_flight) == (0, (3, 3, 3))
    chosen = of_experts("fp8-block")
    assert (chosen.waiting_copies_in_flight, chosen.copies_in_flight) == (6, (6, 6, 6))
    several = chosen.with_room_for(MAX_QUERIES, samples=False)
    assert (several.waiting_copies_in_flight, several.copies_in_flight) == (2, (4, 4, 4))


def test_slots_are_given_back_late_where_blocks_do_not_wait_for_the_memory() -> None:
    def late(plan: Plan) -> tuple[bool, bool]:
        return plan.releases_late(1), plan.releases_late(MAX_QUERIES)

    assert late(of_experts("int4")) == (True, True)
    assert late(of_experts("fp8-block", with_shared_mlp(MIXTURE))) == (False, True)
    assert late(planned("llama-3.1-8b", "int4", "sm_90a")) == (False, True)
    assert late(planned("llama-3.1-8b", "int4", "sm_89")) == (False, False)
    assert late(make_plan(MIXTURE, Dtype.BF16, TYPICAL["sm_90a"])) == (False, False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_turns_are_as_long_as_full_slots_take(ranks: int) -> None:
    """Slots of half the bytes are half a ring, which is empty before a block goes on."""
    config = model("llama-3.1-8b")
    plan = make_plan(
        config, Dtype.BF16, TYPICAL["sm_90a"], ranks=ranks,
        formats=formats_of(alike(config, "int4")),
    )  # fmt: skip
    for op in plan.operations:
        assert op.slot_tiles == op.matrix.format.tiles, op.matrix.name
