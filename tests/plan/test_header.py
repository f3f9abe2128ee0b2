"""The header says what the plan says."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from interpreter.quantised import as_q4_k_m, formats_of
from plan.shapes import PUBLIC, SMALL, all_operations, etude, everything
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import Build, Segment, header, header_of, segments
from soloist.megakernel.limits import EXCHANGE_COPIES, MAX_QUERIES, THREADS
from soloist.megakernel.plan import Plan, make_plan
from soloist.megakernel.tile import SLOT_BYTES
from soloist.megakernel.trace import num_words
from soloist.model.dtype import Dtype

GOLDEN = Path(__file__).parent / "golden" / "etude-sm_90a.cuh"
_CONSTANT = re.compile(r"constexpr (bool|float|unsigned|unsigned long long) (k\w+) = ([^;]+);")
_STRUCT = re.compile(r"^ *struct (\w+) \{(.*)\};$", re.MULTILINE)


def value(kind: str, text: str) -> float:
    """A literal of the header."""
    if kind == "bool":
        return {"true": True, "false": False}[text]
    return float.fromhex(text.removesuffix("f")) if kind == "float" else int(text.rstrip("ul"))


def constants(text: str) -> dict[str, float]:
    """All of them; each may be there once."""
    found = _CONSTANT.findall(text)
    assert len({name for _, name, _ in found}) == len(found), "a constant stands twice"
    return {name: value(kind, literal) for kind, name, literal in found}


def parsed(
    plan: Plan, build: Build | None = None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Constants of the kernel, the model and its layers, and those of every operation."""
    text = header(plan, build or Build())
    inside = {name: constants(body) for name, body in _STRUCT.findall(text)}
    return constants(_STRUCT.sub("", text)), inside


@pytest.fixture(params=[*PUBLIC, "etude", "small"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return make_plan(everything()[request.param], Dtype.BF16, TYPICAL["sm_90a"])


def test_constants_are_the_plans(plan: Plan) -> None:
    seen, _ = parsed(plan)
    attention = plan.model.layers[0].attention
    wanted = {
        "kBf16": True,
        "kNumBlocks": plan.blocks,
        "kThreads": THREADS,
        "kMaxQueries": MAX_QUERIES,
        "kExchangeCopies": EXCHANGE_COPIES,
        "kSlotBytes": SLOT_BYTES,
        "kRingSlots": plan.shared.ring_slots,
        "kRingBytes": plan.shared.ring_slots * SLOT_BYTES,
        "kLayers": plan.model.num_layers,
        "kHidden": plan.model.hidden_size,
        "kVocab": plan.model.vocab_size,
        "kVocabRows": plan.head.matrix.units * 8,
        "kQueryHeads": plan.shape.query_heads,
        "kKvHeads": plan.shape.kv_heads,
        "kGroup": plan.shape.group,
        "kHeadDim": plan.shape.head_dim,
        "kTiedHead": plan.model.tied_head,
        "kQkNorm": attention.qk_norm,
        "kSplits": plan.attention.splits,
        "kSoftmaxLanes": plan.attention.softmax_lanes,
        "kPageSlot": plan.attention.page_slot,
        "kHalfPageBytes": plan.kv_layout.half_page_bytes,
        "kBlockStride": plan.image.block_stride,
        "kTraceWords": num_words(plan),
    }
    assert {name: seen.get(name) for name in wanted} == wanted
    (kind,) = plan.image.kinds
    for stride in (kind.num_bytes, kind.vector_values):
        assert f"(layer) * {stride}u; }}" in header(plan)
    assert seen["kScoreScale"] == pytest.approx(plan.shape.head_dim**-0.5 / math.log(2), rel=1e-6)
    assert seen["kEpsilon"] == pytest.approx(plan.model.norm_epsilon, rel=1e-6)


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def test_offsets_are_the_plans(plan: Plan) -> None:
    seen, _ = parsed(plan)
    for name, buffer in plan.exchanges.workspace.items():
        assert seen[f"kWs{camel(name)}"] == buffer.offset
        assert seen[f"kWs{camel(name)}Bytes"] == buffer.num_bytes
        if name != "best":  # the kernel divides by the number of copies
            assert buffer.num_bytes == math.prod(buffer.shape), "no rounding between copies"
            assert buffer.num_bytes % (16 * EXCHANGE_COPIES) == 0, "copies are aligned"
    for name, buffer in plan.shared.buffers.items():
        assert seen[f"kSh{camel(name)}"] == buffer.offset
    for name, buffer in plan.image.kinds[0].vectors.items():
        assert seen[f"kVec{camel(name)}"] * 4 == buffer.offset


def test_operations_are_the_plans(plan: Plan) -> None:
    _, structs = parsed(plan)
    for op in all_operations(plan):
        m, seen = op.matrix, structs[camel(op.matrix.name)]
        assert (seen["kUnits"], seen["kMaxUnits"]) == (m.units, m.max_units)
        assert (seen["kSteps"], seen["kTiles"]) == (m.steps, op.group_tiles)
        assert seen["kBlocks"] == plan.blocks
        assert (seen["kDepth"], seen["kOffset"]) == (
            plan.depth_of(op, 8),
            plan.image.matrix_offset(0, m.name),
        )
        assert seen["kUnitHalves"] * 8 == m.unit_rows
        counts = {m.num_units(b) for b in range(plan.blocks)}
        assert seen["kEven"] == (len(counts) == 1)
        if op is not plan.head:
            assert 2 * seen["kTiles"] >= seen["kMaxUnits"] * seen["kUnitHalves"]


def test_windows_and_rotations_are_listed_by_layer() -> None:
    layer = SMALL.layers[0]
    other = replace(layer, attention=replace(layer.attention, window=77, rope=False))
    model = replace(SMALL, layers=(layer, other, layer))
    text = header(make_plan(model, Dtype.FP16, TYPICAL["sm_120a"]))
    assert "kModelWindow[] = {0, 77, 0};" in text
    assert "kModelRotated[] = {1, 0, 1};" in text
    assert "constexpr bool kBf16 = false;" in text


def test_a_traced_round_is_asked_for() -> None:
    plan = make_plan(SMALL, Dtype.BF16, TYPICAL["sm_90a"])
    assert "constexpr bool kTrace = false;" in header(plan)
    traced = header(plan, Build(trace_round=3))
    assert "constexpr bool kTrace = true;\nconstexpr unsigned kTraceRound = 3u;" in traced


def test_a_build_for_tests_is_asked_for() -> None:
    plan = make_plan(SMALL, Dtype.BF16, TYPICAL["sm_90a"])
    assert "kSilentBlock = 4294967295ull;" in header(plan)
    assert "kAlone = false;" in header(plan)
    broken = header(plan, Build(ablation=2, silent_block=1, stuck_ns=10**6, alone=True))
    for constant in ("kAblation = 2u", "kSilentBlock = 1u", "kStuckNs = 1000000u", "kAlone = true"):
        assert f"{constant};" in broken


def test_a_build_for_one_query_keeps_the_order_of_sums(plan: Plan) -> None:
    single, _ = parsed(plan, Build(queries=1))
    several, _ = parsed(plan)
    assert (single["kMostQueries"], several["kMostQueries"]) == (1, MAX_QUERIES)
    # As many warps share a half page of positions, for fewer tiles of rows.
    assert single["kWarpTiles"] == 1
    sharing = {build["kRowTiles"] / build["kWarpTiles"] for build in (single, several)}
    assert sharing == {plan.attention.row_tiles // plan.attention.warp_tiles}
    changed = {name for name in single if single[name] != several[name]}
    memory = {name for name in changed if name.startswith("kSh")}
    memory |= {"kRingSlots", "kRingBytes", "kEarlySlots", "kReduceBytes", "kWideReduceBytes"}
    memory.add("kPageBatchSlots")
    assert changed - memory <= {"kMostQueries", "kRowTiles", "kWarpTiles"}
    assert single["kRingSlots"] >= several["kRingSlots"], "fewer queries leave it more room"


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("0", [(0, 1, "0")]),
        ("0000", [(0, 4, "0")]),
        ("00010001", [(0, 8, "0001")]),
        ("000100010", [(0, 8, "0001"), (8, 9, "0")]),
        ("0111", [(0, 1, "0"), (1, 4, "1")]),
        ("012", [(0, 1, "0"), (1, 2, "1"), (2, 3, "2")]),
    ],
)
def test_layers_are_looped_over_by_period(kinds: str, wanted: list[tuple[int, int, str]]) -> None:
    found = segments([int(kind) for kind in kinds])
    assert found == [Segment(a, b, tuple(map(int, period))) for a, b, period in wanted]
    layers = [k for s in found for k in s.kinds * ((s.end - s.first) // len(s.kinds))]
    assert layers == [int(kind) for kind in kinds]


def test_several_models_share_a_kernel() -> None:
    small, large = (make_plan(m, Dtype.BF16, TYPICAL["sm_90a"]) for m in (SMALL, etude()))
    blocks = min(small.blocks, large.blocks)
    plans = {"Draft": replace(small, blocks=blocks), "Large": replace(large, blocks=blocks)}
    text = header_of(plans, Build())
    assert text.count("kNumBlocks =") == 1
    for name, plan in plans.items():
        struct = text[text.index(f"struct {name} {{") :]
        assert f"kHidden = {plan.model.hidden_size}u;" in struct[: struct.index("struct Layer0")]
        assert f"using M = {name};" in text
    with pytest.raises(AssertionError, match="models of one kernel"):
        header_of(plans | {"Other": replace(small, blocks=blocks - 1)}, Build())


def test_layers_that_differ_in_formats_only_share_code() -> None:
    """One loop, in which a phase that has two formats asks which one a layer has."""
    config = replace(SMALL, layers=SMALL.layers[:1] * 8, tied_head=False)
    formats = formats_of(as_q4_k_m(config))
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], formats=formats)
    kinds = (0, 1, 1, 0, 1, 1, 0, 0)
    assert plan.image.kind_of == kinds
    text = header(plan)
    assert f"kModelVariant[] = {{{', '.join(map(str, kinds))}}};" in text
    offsets = ", ".join(f"{plan.image.layer_offset(i)}ull" for i in range(8))
    assert f"kModelWeights[] = {{{offsets}}};" in text
    assert re.findall(r"struct (Layer\d) \{", text) == ["Layer0", "Layer1"]
    assert text.count("run_layer(") == 1
    for place in (0, 1):  # both know all phases; the loop runs the first
        body = text[text.index(f"struct Layer{place} {{") :]
        run = body[body.index("void run(C& cx") :]
        run = run[: run.index("};")]
        for phase in ("qkv", "down"):
            assert f"if (kModelVariant[layer] == 0u) {phase}(Layer0{{}}, cx, layer);" in run
            assert f"{phase}(Layer1{{}}, cx, layer);" in run
        for phase in ("attention", "attention_output", "gate_up"):
            assert len(re.findall(rf"\b{phase}\(Layer", run)) == 1
    # Weights of a layer are a table's, vectors lie evenly.
    assert text.count("return kModelWeights[layer];") == 2
    assert text.count(f"(layer) * {plan.image.kinds[0].vector_values}u; }}") == 2


def test_the_golden_header() -> None:
    text = header(make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"]))
    seen, wanted = text.splitlines(), GOLDEN.read_text().splitlines()
    changes = [f"- {x}" for x in wanted if x not in seen] + [
        f"+ {x}" for x in seen if x not in wanted
    ]
    assert text == GOLDEN.read_text(), (
        "étude's header for sm_90a changed:\n" + "\n".join(changes) + "\n\nif that is meant, write "
        "it anew and look at the difference: PYTHONPATH=tests python -m plan.write_golden"
    )
