"""The kernels compile for every family and architecture: no warning, no spill, no overrun.

Most of a kernel depends on a model's shape by constants only. What makes other code is compiled:
every head dimension, biases, norms of q and k, windows, layers without rope, tied and untied heads,
both 16-bit types, several groups of tiles. By default that is for Hopper, and étude for every
architecture; the compiler's front end, which sees what static assertions refuse, accepts the rest.
What it only sees is compiled as `slow`, and so are most shapes of public models and formats.

What Hopper's code takes (registers, instructions, bytes) is compared with `code_sizes.json`: code
that runs once a layer costs time by its length, which no other test without a GPU sees. A change
that means to change code writes the file anew and shows the difference:

    pytest tests/unit/megakernel/test_compile.py --record-code-sizes -m "slow or not slow"
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from interpreter import lane_models
from interpreter.mixtures import (
    MIXTURES,
    SMS,
    glm_45_air,
    mixtral_8x7b,
    qwen15_moe_a27b,
    routing_early,
)
from interpreter.models import CASES, MIXED, REFUSED, gpu
from interpreter.quantised import alike, as_q4_k_m, formats_of
from plan.shapes import (
    LANEFORMER,
    MIXTURE,
    PUBLIC,
    SHAPES,
    SMALL,
    WIDE,
    etude,
    operation,
    shaped,
)
from soloist.engine.bandwidth import bandwidth_source
from soloist.jit.cache import load_or_build
from soloist.jit.compiler import Cubin, compile_source, require_clean
from soloist.jit.source import Source
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import ABLATIONS, Build, header
from soloist.megakernel.limits import MAX_QUERIES, THREADS
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import FAMILIES, read_config
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from unit.jit.small import one_file
from unit.megakernel import code_sizes, two_models
from unit.megakernel.assembly import assembly, front_end_log
from unit.megakernel.code_sizes import CodeSize
from unit.model.configurations import MISTRAL_7B, QWEN25_05B, SMOLLM3_3B, written

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("nvidia") is None,
    reason="needs cuda-bindings and nvidia-cuda-nvrtc",
)

RUNNING = Build()  # as requests run it
# Threads of a block times registers of each must fit the SM's register file.
REGISTERS = 64 * 1024

# Code for a whole generation of GPUs, which cannot move registers between warps.
PLAIN = {arch: replace(TYPICAL[f"{arch}a"], arch=arch) for arch in ("sm_100", "sm_120")}
GPUS = {**TYPICAL, **PLAIN}
FILES = {"mistral-7b": MISTRAL_7B, "smollm3-3b": SMOLLM3_3B, "qwen2.5-0.5b": QWEN25_05B}
LARGE = tuple(dict.fromkeys((*PUBLIC, *FILES, *SHAPES)))
# Smaller chips, whose blocks own more of a model: A10, L4, RTX A5000, RTX 4080.
SMALLER = [("sm_86", 72), ("sm_89", 58), ("sm_86", 64), ("sm_89", 76)]


def configured(name: str, folder: Path) -> ModelConfig:
    if name == "etude":
        return etude()
    if name in SHAPES:
        return read_config(SHAPES[name])
    if name in PUBLIC:
        return PUBLIC[name]
    values = FILES[name] if name in FILES else CASES[name][0]
    return read_config(written(folder, values))


def compiled(plan: Plan, build: Build) -> Cubin:
    """Once in a process, for tests that ask about the same code."""
    return load_or_build(Source("kernels/decode.cu", header(plan, build)), plan.gpu.arch, None)


def require_accepted(plan: Plan, build: Build = RUNNING) -> None:
    """By the compiler's front end, without a word; a thousandth of the work of making code."""
    assert front_end_log(Source("kernels/decode.cu", header(plan, build)), plan.gpu.arch) == ""


@pytest.fixture
def require_sound(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compile; nothing may spill, all must fit, and code for Hopper be as long as recorded."""

    def require(plan: Plan, build: Build = RUNNING) -> None:
        cubin = compiled(plan, build)
        resources = require_clean(cubin, "decode", plan.shared.num_bytes, plan.gpu.shared_bytes)
        assert resources.registers * THREADS <= REGISTERS
        if plan.gpu.arch == "sm_90a":
            found = CodeSize.of(cubin, "decode")
            code_sizes.compare(request.node.name, found, request.config)

    return require


def test_the_front_end_sees_what_templates_refuse_and_warnings(tmp_path: Path) -> None:
    text = (
        'template <int n> __device__ void f() { static_assert(n > 1, "too few"); }\n'
        'extern "C" __global__ void k() { int unused; f<%d>(); }\n'
    )
    assert "warning #177-D" in front_end_log(one_file(tmp_path / "sound", text % 2), "sm_90a")
    with pytest.raises(AssertionError, match="too few"):
        front_end_log(one_file(tmp_path / "broken", text % 1), "sm_90a")


def test_every_supported_family_is_compiled() -> None:
    lanes = {"laneformer", "laneformer_tp"}  # below
    compiled_here = {values["model_type"] for values, _ in CASES.values()}
    assert compiled_here == set(FAMILIES) - lanes - MIXED - REFUSED


# On architectures that étude stands for below.
ELSEWHERE = [(name, arch) for arch in TYPICAL if arch != "sm_90a" for name in CASES]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, "sm_90a") for name in CASES),
        *(pytest.param(name, arch, marks=pytest.mark.slow) for name, arch in ELSEWHERE),
    ],
)
def test_families_compile_cleanly(name: str, arch: str, tmp_path: Path, require_sound) -> None:
    require_sound(make_plan(configured(name, tmp_path), Dtype.BF16, GPUS[arch]))


@pytest.mark.parametrize(("name", "arch"), ELSEWHERE)
def test_the_front_end_accepts_families_elsewhere(name: str, arch: str, tmp_path: Path) -> None:
    require_accepted(make_plan(configured(name, tmp_path), Dtype.BF16, GPUS[arch]))


@pytest.mark.few(3)
@pytest.mark.parametrize("arch", GPUS)
def test_etude_compiles_cleanly(arch: str, require_sound) -> None:
    require_sound(make_plan(etude(), Dtype.BF16, GPUS[arch]))


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
def test_etude_compiles_with_sampling(arch: str, require_sound) -> None:
    require_sound(make_plan(etude(), Dtype.BF16, GPUS[arch]), Build(samples=True))


@pytest.mark.parametrize(
    ("arch", "samples"),
    [
        pytest.param("sm_90a", False, marks=pytest.mark.slow),
        ("sm_90a", True),
        pytest.param("sm_80", True, marks=pytest.mark.slow),
    ],
)
def test_drafting_compiles_cleanly(arch: str, samples: bool, require_sound) -> None:
    plan = make_plan(etude(), Dtype.BF16, GPUS[arch])
    require_sound(plan, Build(samples=samples, drafts=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-1.7b", "llama-3.1-8b"])
@pytest.mark.parametrize("samples", [False, True])
def test_drafting_compiles_with_public_shapes(name: str, samples: bool, require_sound) -> None:
    plan = make_plan(PUBLIC[name], Dtype.BF16, GPUS["sm_90a"])
    require_sound(plan, Build(samples=samples, drafts=True))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_one_query_compiles_cleanly(arch: str, require_sound) -> None:
    require_sound(make_plan(etude(), Dtype.BF16, GPUS[arch]), Build(queries=1))


def test_one_query_takes_less_code() -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"])
    single, several = (compiled(plan, Build(queries=queries)) for queries in (1, MAX_QUERIES))
    assert len(single.data) < 0.85 * len(several.data)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "build",
    [
        Build(trace_round=3),
        pytest.param(
            Build(trace_round=3, ablation=ABLATIONS["stream"]), marks=pytest.mark.slow
        ),  # both are compiled apart
        Build(silent_block=3, stuck_ns=10**8),
        Build(racecheck=True),
        *(Build(ablation=ablation) for ablation in ABLATIONS.values() if ablation),
    ],
    ids=["trace", "resident", "silent", "racecheck", *list(ABLATIONS)[1:]],
)
def test_builds_for_looking_inside_compile(build: Build) -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"])
    assert compiled(plan, build).report.warnings == ()


@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
def test_experts_compile_cleanly(queries: int, require_sound) -> None:
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"])
    require_sound(plan, Build(queries=queries))


# Bytes that are spilled and read back, once a layer or less: by format, whether the head has it,
# too, and number of queries.
SPILLED_OF_MIXTURE: dict[tuple[str, bool, int], int] = {
    ("fp8-block", True, 1): 80, ("fp8", True, 1): 80,
    ("fp8-block", False, MAX_QUERIES): 16, ("fp8", False, MAX_QUERIES): 16,
    ("int4", False, MAX_QUERIES): 16,
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("head", [True, False], ids=["head", "head in 16 bits"])
@pytest.mark.parametrize("kind", ["fp8-block", "fp8", "int4"])
def test_quantised_experts_compile(
    kind: str, head: bool, queries: int, request: pytest.FixtureRequest
) -> None:
    config = read_config(MIXTURE)
    stored = {name: one for name, one in alike(config, kind).items() if head or name != "head"}
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], formats=formats_of(stored))
    build = Build(queries=queries)
    most = SPILLED_OF_MIXTURE.get((kind, head, queries), 0)
    require_as_little_spilled(plan, build, most)
    found = CodeSize.of(compiled(plan, build), "decode")
    code_sizes.compare(request.node.name, found, request.config)


@pytest.mark.few(1)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
def test_logits_behind_the_residual_compile_cleanly(queries: int, require_sound) -> None:
    """As beside a bias of attention_output, which no logits of both parts could have."""
    with routing_early(early=False):
        plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"])
        assert not plan.routes_early
        require_sound(plan, Build(queries=queries))


@pytest.mark.few(1)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
def test_a_mixture_on_two_gpus_compiles(queries: int, request: pytest.FixtureRequest) -> None:
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"], ranks=2)
    build = Build(queries=queries)
    require_as_little_spilled(plan, build, 0 if queries == 1 else 104)
    found = CodeSize.of(compiled(plan, build), "decode")
    code_sizes.compare(request.node.name, found, request.config)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_front_end_accepts_logits_beside_attention_output(name: str, ranks: int) -> None:
    with routing_early(early=True):
        plan = make_plan(MIXTURES[name], Dtype.BF16, gpu(SMS), ranks)
        assert plan.routes_early
        for queries in (1, MAX_QUERIES):
            require_accepted(plan, Build(queries=queries))


# Bytes that are spilled, by number of queries. Without what all tokens take the same layers spill
# 832 for eight of glm-4.5-air in 16 bits.
SPILLED_BESIDE_SHARED: dict[tuple[str, str | None, int], int] = {
    ("qwen1.5-moe-a2.7b", None, 1): 164, ("qwen1.5-moe-a2.7b", None, MAX_QUERIES): 424,
    ("qwen1.5-moe-a2.7b", "fp8-block", 1): 228, ("qwen1.5-moe-a2.7b", "int4", 1): 296,
    # Nothing is spilled, but there is an array on the stack.
    ("qwen1.5-moe-a2.7b", "fp8-block", MAX_QUERIES): 64,
    ("qwen1.5-moe-a2.7b", "int4", MAX_QUERIES): 64,
    ("glm-4.5-air", None, 1): 908, ("glm-4.5-air", None, MAX_QUERIES): 900,
    ("glm-4.5-air", "fp8-block", 1): 468, ("glm-4.5-air", "int4", 1): 48,
}  # fmt: skip
OF_SHARED = {"qwen1.5-moe-a2.7b": qwen15_moe_a27b, "glm-4.5-air": glm_45_air}


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen1.5-moe-a2.7b", None), ("glm-4.5-air", "fp8-block"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name, kind in (
                ("qwen1.5-moe-a2.7b", "fp8-block"), ("qwen1.5-moe-a2.7b", "int4"),
                ("glm-4.5-air", None), ("glm-4.5-air", "int4"),
            )
        ),
    ],
)  # fmt: skip
def test_what_all_tokens_take_compiles(
    name: str, kind: str | None, queries: int, request: pytest.FixtureRequest
) -> None:
    config = OF_SHARED[name]()
    formats = {} if kind is None else formats_of(alike(config, kind))
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], formats=formats)
    build = Build(queries=queries)
    most = SPILLED_BESIDE_SHARED.get((name, kind, queries), 0)
    require_as_little_spilled(plan, build, most)
    found = CodeSize.of(compiled(plan, build), "decode")
    code_sizes.compare(request.node.name, found, request.config)


# Of Qwen3-235B-A22B's config.json, where it differs from that of Qwen3-30B-A3B.
QWEN3_235B = {
    "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "max_window_layers": 94,
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_experts_and_wide_queries_compile_cleanly(
    ranks: int, queries: int, tmp_path: Path, require_sound
) -> None:
    config = read_config(written(tmp_path, {**json.loads(MIXTURE.read_text()), **QWEN3_235B}))
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], ranks)
    assert plan.shape.group == 16
    require_sound(plan, Build(queries=queries))


# Bytes that are spilled once a layer, by the router of eight queries.
SPILLED_BY_ROUTERS = {
    "mixtral-8x7b": 376, "some layers dense": 100, "shared of several sizes": 20,
}  # fmt: skip
OTHER_MIXTURES = {**MIXTURES, "mixtral-8x7b": mixtral_8x7b()}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_MIXTURES)
def test_other_mixtures_compile(name: str) -> None:
    on = gpu(SMS) if name in MIXTURES else TYPICAL["sm_90a"]
    plan = make_plan(OTHER_MIXTURES[name], Dtype.BF16, on)
    require_as_little_spilled(plan, Build(), SPILLED_BY_ROUTERS.get(name, 0))


# Bytes that builds for eight queries spill and read back; those for one query spill nothing.
SPILLED_BY_EXPERTS: dict[tuple[str | None, str], int] = {
    (None, "sm_80"): 628, (None, "sm_89"): 60, (None, "sm_100a"): 8, (None, "sm_120a"): 372,
    ("fp8-block", "sm_80"): 1140, ("fp8-block", "sm_89"): 156, ("fp8-block", "sm_120a"): 72,
    ("int4", "sm_100a"): 216, ("int4", "sm_120a"): 124,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "fp8-block", "int4"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
def test_experts_compile_elsewhere(arch: str, kind: str | None) -> None:
    """Though they are refused there, so that this stays known."""
    if (kind, arch) == ("int4", "sm_80"):
        pytest.skip("takes 128 bytes of shared memory more than there are")
    config = read_config(MIXTURE)
    formats = {} if kind is None else formats_of(alike(config, kind))
    plan = make_plan(config, Dtype.BF16, TYPICAL[arch], formats=formats)
    require_as_little_spilled(plan, Build(queries=1), 0)
    most = SPILLED_BY_EXPERTS.get((kind, arch), 0)
    require_as_little_spilled(plan, Build(queries=MAX_QUERIES), most)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_front_end_accepts_mixtures(name: str) -> None:
    config = MIXTURES[name]
    require_accepted(make_plan(config, Dtype.FP16, gpu(SMS, "sm_80"), 2), Build(samples=True))
    traced = Build(trace_round=3, queries=1)
    require_accepted(make_plan(config, Dtype.BF16, gpu(SMS, "sm_120a")), traced)
    for kind in ("fp8-block", "int4", "int4-zeros", "int4-offsets", "int8"):
        formats = formats_of(alike(config, kind))
        require_accepted(make_plan(config, Dtype.BF16, gpu(SMS, "sm_80"), formats=formats))
        quantised = make_plan(config, Dtype.FP16, gpu(SMS), formats=formats)
        require_accepted(quantised, Build(queries=1))


def coded_plan(config: ModelConfig, kv: KvName, arch: str) -> Plan:
    return make_plan(config, Dtype.BF16, GPUS[arch], kv=kv_format(kv, config, Dtype.BF16))


@pytest.mark.few(2)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_keys_and_values_in_codes_compile_cleanly(kv: KvName, queries: int, require_sound) -> None:
    require_sound(coded_plan(etude(), kv, "sm_90a"), Build(queries=queries))


# Bytes that builds for eight queries spill and read back where a warp takes two tiles of rows of
# heads with more than 64 values: most of them once a layer.
SPILLED_BY_TWO_TILES: dict[KvName, int] = {"int8": 346, "fp8": 326, "int4": 706}


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("name", ["qwen3-1.7b", "llama-3.1-8b"])
def test_codes_compile_with_public_shapes(
    name: str, kv: KvName, queries: int, require_sound
) -> None:
    plan = coded_plan(PUBLIC[name], kv, "sm_90a")
    if queries > 1 and plan.attention.warp_tiles > 1:
        require_as_little_spilled(plan, Build(queries=queries), SPILLED_BY_TWO_TILES[kv])
    else:
        require_sound(plan, Build(queries=queries))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kv", ["int8", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("fp8", "int4"))]
)
@pytest.mark.parametrize(
    "name", ["llama-untied-biases-32", "mistral-window-96", "llama-one-kv-head-128"]
)
def test_codes_compile_with_other_heads(name: str, kv: KvName, tmp_path: Path) -> None:
    plan = coded_plan(configured(name, tmp_path), kv, "sm_90a")
    has_two = plan.attention.warp_tiles > 1 and plan.shape.head_dim > 64
    require_as_little_spilled(plan, Build(queries=1), 0)
    require_as_little_spilled(plan, Build(), SPILLED_BY_TWO_TILES[kv] if has_two else 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize("name", WIDE)
def test_wide_queries_compile_cleanly(name: str, queries: int, require_sound) -> None:
    require_sound(make_plan(WIDE[name], Dtype.BF16, TYPICAL["sm_90a"]), Build(queries=queries))


@pytest.mark.few(1)
@pytest.mark.parametrize("queries", [1, MAX_QUERIES])
@pytest.mark.parametrize(
    "kv", ["int8", *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("fp8", "int4"))]
)
@pytest.mark.parametrize("name", WIDE)
def test_codes_compile_with_wide_queries(
    name: str, kv: KvName, queries: int, require_sound
) -> None:
    require_sound(coded_plan(WIDE[name], kv, "sm_90a"), Build(queries=queries))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "sm_90a"])
@pytest.mark.parametrize("name", WIDE)
def test_wide_queries_compile_elsewhere(name: str, arch: str, require_sound) -> None:
    """On four GPUs: of fewer some have too few blocks, and registers, for so many rows."""
    for queries in (1, MAX_QUERIES):
        plan = make_plan(WIDE[name], Dtype.BF16, GPUS[arch], 4)
        require_sound(plan, Build(queries=queries, samples=True))


@pytest.mark.slow
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("name", ["etude", "llama-3.1-8b"])
def test_drafting_compiles_with_codes(name: str, kv: KvName, tmp_path: Path) -> None:
    plan = coded_plan(configured(name, tmp_path), kv, "sm_90a")
    most = SPILLED_BY_TWO_TILES[kv] if plan.shape.head_dim > 64 else 0
    require_as_little_spilled(plan, Build(drafts=True), most)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "ranks"),
    [
        ("int8", 1),
        *(
            pytest.param(kv, ranks, marks=pytest.mark.slow)
            for kv in KV_FORMATS
            for ranks in (1, 8)
            if (kv, ranks) != ("int8", 1)
        ),
    ],
)
def test_codes_compile_with_lanes(kv: KvName, ranks: int) -> None:
    config = read_config(LANEFORMER)
    codes = kv_format(kv, config, Dtype.BF16)
    plan = make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], ranks, kv=codes)
    for queries in (1, MAX_QUERIES):
        require_as_little_spilled(plan, Build(queries=queries), 0)


@pytest.mark.parametrize("arch", [arch for arch in TYPICAL if arch != "sm_90a"])
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_the_front_end_accepts_codes_elsewhere(kv: KvName, arch: str) -> None:
    for queries in (1, MAX_QUERIES):
        require_accepted(coded_plan(etude(), kv, arch), Build(queries=queries, samples=True))


# Bytes that are spilled, and read back.
SPILLED_BY_CODES: dict[tuple[KvName, str, int], int] = {("int4", "sm_100a", MAX_QUERIES): 20}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in TYPICAL if arch != "sm_90a"])
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_codes_compile_elsewhere(kv: KvName, arch: str) -> None:
    for queries in (1, MAX_QUERIES):
        most = SPILLED_BY_CODES.get((kv, arch, queries), 0)
        require_as_little_spilled(coded_plan(etude(), kv, arch), Build(queries=queries), most)
    wide = coded_plan(PUBLIC["llama-3.1-8b"], kv, arch)
    require_as_little_spilled(wide, Build(), 0)


@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_fp16_compiles_cleanly(arch: str, require_sound) -> None:
    require_sound(make_plan(etude(), Dtype.FP16, TYPICAL[arch]))


@pytest.mark.few(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_groups_of_tiles_compile_cleanly(arch: str, tmp_path: Path, require_sound) -> None:
    config = configured("llama-one-kv-head-128", tmp_path)
    plan = make_plan(config, Dtype.BF16, replace(GPUS[arch], num_sms=8))
    assert operation(plan, "gate_up").matrix.max_tiles > operation(plan, "gate_up").group_tiles
    require_sound(plan)


Q4_K_M = "Q4_K_M"
# Bytes of registers that builds with quantised matrices spill and read back, by shape, format,
# architecture and queries: none may grow, and every other build spills nothing.
SPILLED: dict[tuple[str, str, str, int], int] = {
    ("llama-3.1-8b", "fp8-32", "sm_90a", 1): 16,
    # Not in the loops of multiplies.
    ("llama-3.1-8b", Q4_K_M, "sm_90a", 1): 196,
    ("llama-3.1-8b", Q4_K_M, "sm_90a", MAX_QUERIES): 88,
}
QUANTISED = [
    ("small", "int4-zeros", "sm_90a", MAX_QUERIES),
    ("small", "fp8-block", "sm_90a", MAX_QUERIES),
    ("small", "int8-permuted", "sm_90a", MAX_QUERIES),
    ("small", "int4", "sm_80", MAX_QUERIES),
    ("small", "fp8", "sm_120a", MAX_QUERIES),
    ("llama-3.1-8b", "int4", "sm_90a", 1),
    ("llama-3.1-8b", "int8", "sm_90a", MAX_QUERIES),
    ("llama-3.1-8b", Q4_K_M, "sm_90a", 1),
    ("llama-3.1-8b", "int4-zeros", "sm_86", MAX_QUERIES),
    ("llama-3.1-8b", "int4-permuted", "sm_120a", MAX_QUERIES),
    ("qwen3-1.7b", "fp8", "sm_120a", 1),
]
FORMATS = ("int4", "int8", "fp8", "int4-zeros", "int8-zeros", "fp8-block", "fp8-32")
SLOW_QUANTISED = [
    ("small", "super-mixed", "sm_80", MAX_QUERIES),
    *(
        ("llama-3.1-8b", kind, "sm_90a", queries)
        for kind in (*FORMATS, "int4-permuted", Q4_K_M)
        for queries in (1, MAX_QUERIES)
        if ("llama-3.1-8b", kind, "sm_90a", queries) not in QUANTISED
    ),
    *(
        ("llama-3.1-8b", kind, arch, queries)
        for arch in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")
        for kind in ("int4", "int8", "fp8", "int4-zeros", "int4-permuted")
        for queries in (1, MAX_QUERIES)
        if ("llama-3.1-8b", kind, arch, queries) not in QUANTISED
    ),
    *(
        ("qwen3-1.7b", kind, arch, 1)
        for arch in ("sm_100a", "sm_120a")
        for kind in ("int4", "int8", "fp8", "int4-zeros", "int8-zeros")
        if ("qwen3-1.7b", kind, arch, 1) not in QUANTISED
    ),
]


def quantised_plan(name: str, kind: str, arch: str, dtype: Dtype = Dtype.BF16) -> Plan:
    config = replace(SMALL if name == "small" else PUBLIC[name], tied_head=False)
    stored = as_q4_k_m(config) if kind == Q4_K_M else alike(config, kind)
    return make_plan(config, dtype, TYPICAL[arch], formats=formats_of(stored))


def require_as_little_spilled(plan: Plan, build: Build, most: int) -> None:
    """No warning but of spills, at most so many bytes of them, and room for all."""
    cubin = compiled(plan, build)
    assert not [text for text in cubin.report.warnings if "spill" not in text.lower()]
    taken = cubin.report.entries["decode"]
    assert taken.registers * THREADS <= REGISTERS
    planned = plan.with_room_for(build.queries, samples=build.samples).shared.num_bytes
    assert planned + taken.static_shared_bytes <= plan.gpu.shared_bytes
    assert taken.spill_store_bytes + taken.spill_load_bytes <= most
    assert taken.stack_bytes <= most


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kind", "arch", "queries"),
    [*QUANTISED, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_QUANTISED)],
)
def test_quantised_matrices_compile(name: str, kind: str, arch: str, queries: int) -> None:
    most = SPILLED.get((name, kind, arch, queries), 0)
    require_as_little_spilled(quantised_plan(name, kind, arch), Build(queries=queries), most)


@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8"))]
)
def test_quantised_matrices_compile_with_fp16(kind: str) -> None:
    plan = quantised_plan("small", kind, "sm_90a", Dtype.FP16)
    require_as_little_spilled(plan, Build(samples=True), 0)


# Of qwen3-4b and qwen2.5-7b: blocks have 8 rows left over, in an odd number of steps.
ODD = [
    (sizes, kind, queries)
    for sizes in ((2560, 9728, 32, 8), (3584, 18944, 28, 4))
    for kind in ("int4", "int8", "fp8")
    for queries in (1, MAX_QUERIES)
]


def odd_plan(sizes: tuple[int, int, int, int], kind: str) -> Plan:
    hidden, ffn, heads, kv = sizes
    config = shaped((hidden, ffn, 2, heads, kv, 128, 151936))
    formats = formats_of(alike(config, kind))
    return make_plan(config, Dtype.BF16, TYPICAL["sm_90a"], formats=formats)


GGUF_BLOCKS = ("super-int4", "super-mixed", "int4-offsets")
ODD_BLOCKS = [(odd[0], kind, odd[2]) for odd in ODD if odd[1] == "int4" for kind in GGUF_BLOCKS]


@pytest.mark.parametrize(("sizes", "kind", "queries"), [*ODD, *ODD_BLOCKS])
def test_the_front_end_accepts_odd_steps_of_quantised_matrices(
    sizes: tuple[int, int, int, int], kind: str, queries: int
) -> None:
    """It sees what has ever been wrong with them: batches that are not whole."""
    require_accepted(odd_plan(sizes, kind), Build(queries=queries))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "kind", "queries"), ODD)
def test_odd_steps_of_quantised_matrices_compile(
    sizes: tuple[int, int, int, int], kind: str, queries: int
) -> None:
    compiled(odd_plan(sizes, kind), Build(queries=queries))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_shapes_compile_cleanly(name: str, require_sound) -> None:
    require_sound(make_plan(PUBLIC[name], Dtype.BF16, TYPICAL["sm_90a"]))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", ["qwen3-norms-128", "llama-untied-biases-32"])
def test_ranks_compile_cleanly(name: str, ranks: int, tmp_path: Path, require_sound) -> None:
    require_sound(make_plan(configured(name, tmp_path), Dtype.BF16, GPUS["sm_90a"], ranks))


@pytest.mark.parametrize(
    "samples",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["greedy", "sampling"],
)
def test_public_shapes_on_ranks_compile_cleanly(samples: bool, require_sound) -> None:
    plan = make_plan(PUBLIC["qwen3-1.7b"], Dtype.BF16, TYPICAL["sm_90a"], 8)
    require_sound(plan, Build(samples=samples))


@pytest.mark.parametrize("name", ["etude", "laneformer"])
def test_a_rank_that_is_alone_compiles_cleanly(name: str, require_sound) -> None:
    config = etude() if name == "etude" else read_config(LANEFORMER)
    plan = make_plan(config, Dtype.FP16, TYPICAL["sm_90a"], 8)
    require_sound(plan, Build(queries=1, alone=True))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", LARGE)
def test_large_shapes_on_ranks_compile_cleanly(
    name: str, ranks: int, samples: bool, tmp_path: Path, require_sound
) -> None:
    plan = make_plan(configured(name, tmp_path), Dtype.BF16, GPUS["sm_90a"], ranks)
    require_sound(plan, Build(samples=samples))


# Rules that make other code: which sums are waited for, who talks, how lanes meet.
LANES = [
    ("sum before norm", 1), ("vocabulary slices", 4),
    *(
        pytest.param(name, ranks, marks=pytest.mark.slow)
        for name, ranks in (
            ("mean of lanes", 2), ("no early sum", 1), ("only MLPs talk", 8), ("scales per lane", 2)
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), LANES)
def test_lanes_compile_cleanly(name: str, ranks: int, tmp_path: Path, require_sound) -> None:
    require_sound(lane_models.configured(name, tmp_path, ranks)[1])


@pytest.mark.parametrize(
    "ranks", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8))]
)
def test_laneformer_compiles_cleanly(ranks: int, require_sound) -> None:
    plan = make_plan(read_config(LANEFORMER), Dtype.FP16, TYPICAL["sm_90a"], ranks)
    require_sound(plan)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_lanes_compile_with_sampling(ranks: int, require_sound) -> None:
    plan = make_plan(read_config(LANEFORMER), Dtype.BF16, TYPICAL["sm_90a"], ranks)
    require_sound(plan, Build(samples=True))


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_laneformer_on_eight_ranks_of_every_architecture(arch: str, require_sound) -> None:
    require_sound(make_plan(read_config(LANEFORMER), Dtype.FP16, GPUS[arch], 8))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("name", LARGE)
def test_large_shapes_compile_cleanly(
    name: str, arch: str, samples: bool, tmp_path: Path, require_sound
) -> None:
    plan = make_plan(configured(name, tmp_path), Dtype.BF16, GPUS[arch])
    require_sound(plan, Build(samples=samples))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "num_sms"), SMALLER, ids=[f"{a}-{n}" for a, n in SMALLER])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_large_shapes_on_smaller_chips(name: str, arch: str, num_sms: int, require_sound) -> None:
    gpu = replace(TYPICAL[arch], num_sms=num_sms)
    require_sound(make_plan(read_config(SHAPES[name]), Dtype.BF16, gpu))


@pytest.mark.parametrize(
    ("arch", "queries"),
    [("sm_80", 1), pytest.param("sm_90a", MAX_QUERIES, marks=pytest.mark.slow)],
)
def test_a_kernel_may_hold_two_models(arch: str, queries: int, tmp_path: Path) -> None:
    plans = (
        make_plan(configured("llama-untied-biases-32", tmp_path), Dtype.BF16, GPUS[arch]),
        make_plan(etude(), Dtype.BF16, GPUS[arch]),
    )
    first, second = two_models.with_one_grid(*plans)
    build = Build(queries=queries)
    cubin = compile_source(two_models.source(first, second, build, tmp_path), arch)
    taken = cubin.report.entries[two_models.ENTRY]
    assert taken.registers * THREADS <= REGISTERS
    needed = two_models.shared_bytes(first, second, build) + taken.static_shared_bytes
    assert needed <= GPUS[arch].shared_bytes
    assert not [warning for warning in cubin.report.warnings if "spill" not in warning.lower()]


@pytest.mark.parametrize("arch", TYPICAL)
def test_the_bandwidth_kernel_compiles_cleanly(arch: str) -> None:
    cubin = compile_source(bandwidth_source(), arch)
    require_clean(cubin, "read", 96 * 1024, TYPICAL[arch].shared_bytes)


# Instructions that one generation of staging has and the other has not.
COPIED_BY_LANES = {
    "cp.async.cg.shared.global",
    "cp.async.mbarrier.arrive.noinc",
}
COPIED_IN_BULK = {
    "cp.async.bulk.shared",
    "mbarrier.arrive.expect_tx",
    "mbarrier.try_wait",
    "fence.proxy.async",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("arch", GPUS)
def test_each_architecture_stages_its_own_way(arch: str) -> None:
    plan = make_plan(SMALL, Dtype.BF16, GPUS[arch])
    ptx = assembly(Source("kernels/decode.cu", header(plan)), arch).decode()
    found = {name for name in COPIED_BY_LANES | COPIED_IN_BULK if name in ptx}
    assert found == (COPIED_BY_LANES if arch in ("sm_80", "sm_86", "sm_89") else COPIED_IN_BULK)
    assert ("setmaxnreg" in ptx) == GPUS[arch].architecture.moves_registers
    # A copy to shared::cluster would be a call of the system on sm_120.
    assert "shared::cluster" not in ptx
