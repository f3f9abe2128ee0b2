"""CUDA kernels against the torch definition, operation by operation and in a whole prompt."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plan.shapes import SHAPES
from soloist.errors import CudaMissing, ShapeUnsupported
from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import compile_source, require_clean
from soloist.jit.source import Source
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.parallel.share import Share, share_of
from soloist.prefill import elementwise
from soloist.prefill.elementwise import Chunk, Delta, Elementwise, Heads, TorchElementwise
from soloist.prefill.fragments import arranged_columns
from soloist.prefill.fused import FusedElementwise
from soloist.prefill.gate_up import (
    ENTRY,
    FEWEST_TOKENS,
    SHARED_BYTES,
    gate_up_source,
    has_gate_up,
)
from soloist.prefill.header import header
from soloist.prefill.part import Part
from soloist.prefill.residual_streams import residual_streams_of
from soloist.prefill.runner import Prefill
from soloist.reference.build import build_reference
from unit.prefill.models import GQA, MODELS, matrices, model, random_weights, vectors

ENTRIES = ("embed", "add_norm", "qkv_rope_store", "gather", "silu_mul")
DTYPES = [torch.bfloat16, torch.float16]
TABLE = [5, 0, 3, 1]


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("arch", TYPICAL)
@pytest.mark.parametrize("name", ["qwen3", "head-128", "mha", "laneformer-2b-as-llama"])
def test_kernels_compile_without_spills(name: str, arch: str, dtype: Dtype) -> None:
    config = read_config(SHAPES[name]) if name in SHAPES else MODELS[name]
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    cubin = compile_source(Source("kernels/prefill.cu", header(config, dtype)), arch)
    for entry in ENTRIES:
        require_clean(cubin, entry, 0, 48 * 1024)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", ["qwen3", "laneformer-2b-as-llama", "llama-3.1-8b"])
def test_kernels_of_ranks_compile_without_spills(name: str, ranks: int) -> None:
    config = read_config(SHAPES[name]) if name in SHAPES else MODELS[name]
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    spec = header(share_of(config, ranks), Dtype.BF16, ranks)
    cubin = compile_source(Source("kernels/prefill.cu", spec), "sm_90a")
    assert not cubin.report.warnings
    for entry in (*ENTRIES, "tell", "await", "sum_norm"):
        require_clean(cubin, entry, 0, 48 * 1024)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize(("hidden", "ffn"), [(256, 128), (960, 2560), (3072, 12288), (8192, 28672)])
def test_gate_up_compiles_without_spills(hidden: int, ffn: int, dtype: Dtype) -> None:
    assert has_gate_up("sm_90a", hidden, ffn)
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    spec = header(model(GQA, hidden_size=hidden, ffn=ffn), dtype)
    cubin = compile_source(gate_up_source(spec), "sm_90a")
    require_clean(cubin, ENTRY, SHARED_BYTES, TYPICAL["sm_90a"].shared_bytes)


@pytest.mark.parametrize(
    ("arch", "hidden", "ffn"),
    [("sm_90", 256, 128), ("sm_90a", 288, 128), ("sm_90a", 256, 192), ("sm_90a", 192, 128)],
)
def test_gate_up_is_for_whole_tiles_on_hopper(arch: str, hidden: int, ffn: int) -> None:
    assert not has_gate_up(arch, hidden, ffn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "ffn"), [(256, 128), (512, 1536)])
def test_gate_up_does_what_its_two_steps_do(
    hidden: int, ffn: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A row has the same bits among any number of rows, and nothing behind them is written."""
    if not has_gate_up(arch(), hidden, ffn):
        pytest.skip("needs a Hopper GPU")
    config = model(GQA, hidden_size=hidden, ffn=ffn)
    weights = on_cuda(random_weights(config))
    e = FusedElementwise(config, vectors(weights), cuda_pool(config, dtype), arch(), tmp_path)
    e.start()
    torch.manual_seed(0)
    x = torch.randn(2048, hidden, device="cuda").to(dtype)
    matrix = (torch.randn(2 * ffn, hidden, device="cuda") * hidden**-0.5).to(dtype)
    wanted, whole = (torch.empty(2048, ffn, device="cuda", dtype=dtype) for _ in range(2))
    e.silu_mul(x @ matrix.mT, None, wanted)
    assert not e.gate_up(x[: FEWEST_TOKENS - 1], matrix, None, whole[: FEWEST_TOKENS - 1])
    assert not e.gate_up(x, matrix, torch.zeros(2 * ffn, device="cuda"), whole)
    assert e.gate_up(x, matrix, None, whole)
    close(whole, wanted)
    kernel = e._gate_up[ffn]
    for rows in (1100, 300, 1):
        out = torch.full((rows + 1, ffn), float("nan"), device="cuda", dtype=dtype)
        kernel.launch(x[:rows], matrix, out[:rows], torch.cuda.current_stream().cuda_stream)
        assert torch.equal(out[:rows], whole[:rows])
        assert out[rows].isnan().all()


def test_sizes_that_wide_accesses_do_not_divide_are_refused() -> None:
    pool = PagePool(1, 2, 8, 6, torch.bfloat16, torch.device("cpu"))
    config = model(GQA, ffn=36)
    weights = vectors(random_weights(config))
    with pytest.raises(ShapeUnsupported, match="FFN size 36"):
        FusedElementwise(config, weights, pool, "sm_90a", None)


def cuda_pool(config: ModelConfig, dtype: torch.dtype) -> PagePool:
    a = config.layers[0].attention
    return PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 6, dtype, torch.device("cuda"))


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major == 9)


def fused(cache_root: Path) -> Callable[..., Elementwise]:
    return partial(FusedElementwise, arch=arch(), cache_root=cache_root)


def on_cuda(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.cuda() for name, values in tensors.items()}


def a_chunk(position: int, num_tokens: int, rows: int) -> Chunk:
    def upload(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    ids = [(7 * i) % 61 for i in range(rows)]
    return Chunk(
        position=position,
        num_tokens=num_tokens,
        ids=upload(ids),
        place=upload([position, num_tokens]),
        last=upload([num_tokens - 1]),
        page_table=upload(TABLE),
        last_place=upload([position + num_tokens - 1, 0]),
        last_ends=upload([0, 1, 0, position + num_tokens]),
        query_bounds=upload([0, num_tokens]),
    )


def close(seen: Tensor, wanted: Tensor) -> None:
    """Equal but for the last bit of what was rounded on the way."""
    rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[wanted.dtype]
    torch.testing.assert_close(seen, wanted, rtol=rtol, atol=rtol / 50)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("position", "num_tokens", "rows"), [(0, 128, 128), (0, 37, 64), (45, 70, 70), (63, 1, 1)]
)
def test_operations(
    name: str, dtype: torch.dtype, position: int, num_tokens: int, rows: int, tmp_path: Path
) -> None:
    config = MODELS[name]
    weights = on_cuda(random_weights(config))
    both = [
        make(config, vectors(weights), cuda_pool(config, dtype))
        for make in (fused(tmp_path), TorchElementwise)
    ]
    torch.manual_seed(0)
    a, ffn = config.layers[0].attention, max(x.mlp.intermediate_size for x in config.layers)
    hidden = config.hidden_size
    chunk = a_chunk(position, num_tokens, rows)
    is_wide = residual_streams_of(config).wide_products(elementwise.DTYPES[dtype])
    delta = torch.randn(rows, hidden, device="cuda").to(torch.float32 if is_wide else dtype)
    other = torch.randn(rows, hidden, device="cuda").to(delta.dtype)
    parts = torch.randn(4, rows, hidden, device="cuda")
    product = torch.randn(rows, a.qkv_rows, device="cuda").to(delta.dtype)
    gate_up = torch.randn(rows, 2 * ffn, device="cuda").to(dtype)
    table = weights["embedding"].to(dtype)
    results: list[dict[str, Tensor]] = []
    for e in both:
        e.start()
        seen: dict[str, Tensor] = {}
        results.append(seen)
        seen["embed"] = torch.empty(rows, hidden, device="cuda")
        e.embed(table, chunk, seen["embed"])
        for layer, own in enumerate(e.layers):
            plain, biased = Delta(delta, None), Delta(other, own.attention_output_bias)
            for label, deltas in (
                ("nothing", []), ("one", [plain]), ("biased", [biased]), ("two", [plain, biased]),
                ("parts", [plain, Delta(parts, own.down_bias)]),
            ):  # fmt: skip
                for keeps in (True, False):
                    which = f"{label} {keeps} {layer}"
                    seen[f"residual {which}"] = residual = seen["embed"].clone()
                    seen[f"normed {which}"] = out = residual.to(dtype)
                    e.add_norm(residual, deltas, own.mlp_norm, out, keeps=keeps)
            queries = torch.empty(rows, a.num_query_heads, a.head_dim, device="cuda", dtype=dtype)
            keys = torch.empty(rows, a.num_kv_heads, a.head_dim, device="cuda", dtype=dtype)
            heads = Heads(queries, keys, keys.clone())
            e.qkv_rope_store(product, layer, chunk, heads)
            seen[f"queries {layer}"], seen[f"keys {layer}"] = heads.queries, heads.keys
            seen[f"values {layer}"] = heads.values
            gathered = torch.zeros(2, 130, a.num_kv_heads, a.head_dim, device="cuda", dtype=dtype)
            e.gather(layer, chunk, *gathered)
            seen[f"gathered {layer}"] = gathered
            neurons = config.layers[layer].mlp.intermediate_size
            seen[f"activated {layer}"] = out = torch.empty(
                rows, neurons, device="cuda", dtype=dtype
            )
            e.silu_mul(gate_up.flatten()[: 2 * out.numel()].view(rows, -1), own.gate_up_bias, out)
        seen["pool"] = e.pool.tensor
    for what, wanted in results[1].items():
        close(results[0][what], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [32, 96, 4096])
def test_norms_may_leave_arranged(hidden: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """The values of norms that do not, in the order in which packed matrices take them."""
    config = replace(MODELS["biases"], hidden_size=hidden)
    weights = on_cuda(random_weights(config))
    own = fused(tmp_path)(config, vectors(weights), cuda_pool(config, dtype))
    own.start()
    torch.manual_seed(0)
    residual = torch.randn(7, hidden, device="cuda")
    is_wide = residual_streams_of(config).wide_products(elementwise.DTYPES[dtype])
    product = torch.randn_like(residual).to(torch.float32 if is_wide else dtype)
    delta = Delta(product, own.layers[0].attention_output_bias)
    plain, arranged = (torch.empty(7, hidden, device="cuda", dtype=dtype) for _ in range(2))
    norm = own.layers[0].mlp_norm
    own.add_norm(residual, [delta], norm, plain, keeps=False)
    own.add_norm(residual, [delta], norm, arranged, keeps=False, arranged=True)
    assert torch.equal(arranged, plain[:, arranged_columns(hidden)])


@pytest.fixture(scope="module", params=MODELS)
def prompt_case(request: pytest.FixtureRequest) -> tuple[ModelConfig, Tensor, Tensor]:
    """Configuration, 200 tokens and the reference's logits of them."""
    config = MODELS[request.param]
    ids = torch.randint(config.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    reference = build_reference(config, random_weights(config))
    logits = reference.forward(ids, 0, reference.new_cache(200), "all")
    assert logits is not None
    return config, ids, logits


def cuda_prefill(
    config: ModelConfig, dtype: torch.dtype, cache_root: Path, most_tokens: int = 256
) -> Prefill:
    weights = on_cuda(random_weights(config))
    held = matrices(weights, dtype)
    pool = cuda_pool(config, dtype)
    share, operations = Share(config, 1, 0), fused(cache_root)
    part = Part(share, held.__getitem__, vectors(weights), pool, operations, most_tokens)
    return Prefill([part])


def near(logits: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> None:
    assert logits is not None
    error = (logits.cpu() - wanted).norm() / wanted.norm()
    assert error < (0.03 if dtype is torch.bfloat16 else 0.004)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[0, 200], [0, 1, 30, 65, 66, 190, 200]], ids=["one", "uneven"])
def test_a_prompt_on_cuda(
    prompt_case: tuple[ModelConfig, Tensor, Tensor],
    dtype: torch.dtype,
    cuts: list[int],
    tmp_path: Path,
) -> None:
    config, ids, wanted = prompt_case
    prefill = cuda_prefill(config, dtype, tmp_path)
    for start, stop in pairwise(cuts):
        near(prefill.run(ids[start:stop], start, TABLE), wanted[stop - 1], dtype)


@pytest.mark.gpu
def test_captured_graphs_do_what_the_launches_do(
    prompt_case: tuple[ModelConfig, Tensor, Tensor], tmp_path: Path
) -> None:
    config, ids, wanted = prompt_case
    launched = cuda_prefill(config, torch.bfloat16, tmp_path)
    captured = cuda_prefill(config, torch.bfloat16, tmp_path)
    captured.capture([32, 64, 128])
    assert not captured.parts[0].pool.tensor.any(), "capturing stores nothing"
    for stop in (128, 1, 33, 64, 100, 128, 200):
        near(captured.run(ids[:stop], 0, TABLE), wanted[stop - 1], torch.bfloat16)
        captured.parts[0].pool.tensor.zero_()
        launched.parts[0].pool.tensor.zero_()
        captured.run(ids[:stop], 0, TABLE)
        launched.run(ids[:stop], 0, TABLE)
        stored = launched.parts[0].pool.tensor != 0
        assert torch.equal(captured.parts[0].pool.tensor != 0, stored), "padding is not stored"
    near(captured.run(ids[:100], 0, TABLE), wanted[99], torch.bfloat16)
    near(captured.run(ids[100:], 100, TABLE), wanted[199], torch.bfloat16)


@pytest.mark.gpu
def test_a_captured_full_chunk_does_what_the_launches_do(
    prompt_case: tuple[ModelConfig, Tensor, Tensor], tmp_path: Path
) -> None:
    """It has an attention of its own, and shorter chunks do not take it."""
    config, ids, wanted = prompt_case
    captured = cuda_prefill(config, torch.bfloat16, tmp_path, most_tokens=128)
    captured.capture([32, 128])
    assert not captured.parts[0].pool.tensor.any(), "capturing stores nothing"
    for cuts in ([0, 128, 200], [0, 100, 200], [0, 20, 148]):
        for start, stop in pairwise(cuts):
            near(captured.run(ids[start:stop], start, TABLE), wanted[stop - 1], torch.bfloat16)
    assert captured.run(ids[:128], 0, TABLE, want_logits=False) is None
    near(captured.run(ids[128:200], 128, TABLE), wanted[199], torch.bfloat16)
