"""First chunks' own attention against torch in fp32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from soloist.errors import CudaMissing
from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import compile_source, require_clean
from soloist.megakernel.gpu import TYPICAL
from soloist.model.dtype import Dtype
from soloist.prefill.attention import visible
from soloist.prefill.elementwise import DTYPES
from soloist.prefill.first_attention import (
    ENTRY,
    FirstAttention,
    first_attention_source,
    has_first_attention,
    shared_bytes,
)

HEAD_DIMS = (64, 96, 128)
TOKENS, QUERY_HEADS = 1200, 16  # more items than a GPU has SMs
# Of the whole result's norm, and of single values: weights and results are rounded to 16 bits.
BOUNDS = {torch.bfloat16: (3e-3, 2e-2), torch.float16: (4e-4, 2.5e-3)}


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16], ids=lambda d: d.value)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_compiles_without_spills(head_dim: int, dtype: Dtype) -> None:
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    cubin = compile_source(first_attention_source(head_dim, dtype), "sm_90a")
    limit = TYPICAL["sm_90a"].shared_bytes
    # What each thread has before groups of warps trade registers.
    assert require_clean(cubin, ENTRY, shared_bytes(head_dim), limit).registers <= 168


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90", 64), ("sm_90a", 80), ("sm_120a", 128)])
def test_it_is_for_some_head_dimensions_on_hopper(arch: str, head_dim: int) -> None:
    assert all(has_first_attention("sm_90a", dim) for dim in HEAD_DIMS)
    assert not has_first_attention(arch, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 4), (96, 8), (128, 16), (128, 1)])
def test_it_does_what_torch_does(
    head_dim: int, kv_heads: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A row has the same bits among any number of rows, and nothing behind them is written."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    heads = tuple(
        torch.randn(TOKENS, count, head_dim, device="cuda").to(dtype)
        for count in (QUERY_HEADS, kv_heads, kv_heads)
    )
    source = first_attention_source(head_dim, DTYPES[dtype])
    kernel = FirstAttention(head_dim, source, tmp_path)

    def attended(rows: int, window: int | None) -> Tensor:
        out = torch.full((rows + 1, QUERY_HEADS, head_dim), float("nan"), device="cuda").to(dtype)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(*(x[:rows] for x in heads), out[:rows], window, stream)
        assert out[rows].isnan().all()
        return out[:rows].flatten(1)

    for window in (None, 1, 100, 128, 500, TOKENS):
        whole = attended(TOKENS, window)
        wanted = exact(heads, window)
        difference = whole.float() - wanted
        of_norm, of_values = BOUNDS[dtype]
        assert difference.norm() <= of_norm * wanted.norm()
        assert difference.abs().max() <= of_values
        for rows in (TOKENS, TOKENS - 1, 300, 128, 64, 1):
            assert torch.equal(attended(rows, window), whole[:rows])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attended_without_looking(kernel, heads)
    graph.replay()
    assert torch.equal(captured.flatten(1), attended(TOKENS, None))


def exact(heads: tuple[Tensor, ...], window: int | None) -> Tensor:
    """The definition, in fp32."""
    queries, keys, values = (x.float().transpose(0, 1) for x in heads)
    keys, values = (x.repeat_interleave(len(queries) // len(x), 0) for x in (keys, values))
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    seen = visible(TOKENS, TOKENS, window, scores.device)
    mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
    return mixed.transpose(0, 1).flatten(1)


def attended_without_looking(kernel: FirstAttention, heads: tuple[Tensor, ...]) -> Tensor:
    """What a graph can capture."""
    queries, keys, values = heads
    out = torch.empty_like(queries)
    kernel.launch(queries, keys, values, out, None, torch.cuda.current_stream().cuda_stream)
    return out
