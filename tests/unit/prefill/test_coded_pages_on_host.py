"""The kernels that round prompts into pages of codes and read them, compiled by g++.

A warp's lanes are coroutines, warps and blocks run one after the other. They have to do what their
definition in torch does, byte for byte.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch

from soloist.jit.compiler import compile_source, require_clean
from soloist.kv.pool import PagePool
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from soloist.prefill.coded_pages import (
    GATHER_ENTRY,
    KERNEL,
    STORE_ENTRY,
    coded_pages_source,
)
from soloist.prefill.elementwise import Chunk, Heads, TorchElementwise
from unit.megakernel.lanes_on_host import LANES, place
from unit.megakernel.test_kv_codes_cuda_on_host import MULTIPLY, fresh_heads
from unit.megakernel.test_sample_cuda_on_host import CUDA, MEMORY
from unit.prefill.models import model, random_weights, vectors

CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("name", KV_FORMATS)
# KV heads and numbers of each.
SHAPES = {"narrow": (2, 32), "64": (3, 64), "96": (1, 96), "128": (2, 128)}
UNTOUCHED = -7.0
PAGES = 12

STUBS = r"""
#define __global__
#define __launch_bounds__(...)
#define __restrict__
static Index blockIdx, gridDim;
"""

MAIN = r"""
#include "kernels/coded_pages.cu"

static void run_grid(u32 blocks, std::function<void()> does) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (u32 warp = 0; warp < kWarps; ++warp) run_warp(warp, [&](u32) { does(); });
}
extern "C" void store(u16* keys, u16* values, u8* pool, const i32* table, const Place* where,
                      u32 layer, i32 rows) {
  const u32 blocks = (rows * Pages::kPoolKvHeads + kWarps - 1) / kWarps;
  run_grid(blocks, [=] { round_store(keys, values, pool, table, where, layer, rows); });
}
extern "C" void gather(const u8* pool, const i32* table, const Place* where, u32 layer, i32 window,
                       u16* keys, u16* values, u32 blocks) {
  run_grid(blocks, [=] { gather_codes(pool, table, where, layer, window, keys, values); });
}
"""


def pool_of(config: ModelConfig, name: KvName) -> PagePool:
    a = config.layers[0].attention
    stored = kv_format(name, config, Dtype.BF16)
    layers = config.num_layers
    return PagePool(layers, a.num_kv_heads, a.head_dim, PAGES, torch.bfloat16, CPU, stored)


def config_of(shape: str, window: int | None = None) -> ModelConfig:
    heads, dim = SHAPES[shape]
    return model(Attention(heads, heads, dim), Attention(heads, heads, dim, window=window))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory):
    """By shape and format, each compiled once."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux to compile CUDA sources for the host")
    made: dict[tuple[str, KvName], ctypes.CDLL] = {}

    def library(shape: str, name: KvName) -> ctypes.CDLL:
        if (shape, name) in made:
            return made[shape, name]
        folder = tmp_path_factory.mktemp("coded_pages")
        spec = coded_pages_source(pool_of(config_of(shape), name).layout).header
        files = {
            "spec.cuh": spec,
            "ptx/memory.cuh": MEMORY + '#include "spec.cuh"\n' + LANES,
            "ptx/types.cuh": (CUDA / "ptx/types.cuh").read_text(encoding="utf-8"),
            "ptx/mma.cuh": MULTIPLY + STUBS,
            "tile/kv_codes.cuh": (CUDA / "tile/kv_codes.cuh").read_text(encoding="utf-8"),
            KERNEL: (CUDA / KERNEL).read_text(encoding="utf-8"),
            "main.cpp": MAIN,
        }
        for at, text in files.items():
            (folder / at).parent.mkdir(parents=True, exist_ok=True)
            (folder / at).write_text(text, encoding="utf-8")
        options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
        out = folder / "pages.so"
        done = subprocess.run(
            [compiler, *options, f"-I{folder}", folder / "main.cpp", "-o", out],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made[shape, name] = ctypes.CDLL(str(out))
        return made[shape, name]

    return library


def chunk_of(position: int, num_tokens: int, table: torch.Tensor) -> Chunk:
    where = torch.tensor([position, num_tokens], dtype=torch.int32)
    return Chunk(position, num_tokens, where, where, where, table, where, where, where)


@pytest.mark.parametrize("shape", SHAPES)
@NAMES
def test_what_is_stored_and_what_is_read_are_those_of_the_definition(
    built, shape: str, name: KvName
) -> None:
    config, code = config_of(shape, window=100), built(shape, name)
    heads, dim = SHAPES[shape]
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).int()
    wanted_pool, pool = pool_of(config, name), pool_of(config, name)
    defined = TorchElementwise(config, vectors(random_weights(config)), wanted_pool)
    # A chunk from the middle of a half page, padding behind it, one of no token, and a later one.
    for position, tokens, rows in ((0, 40, 48), (40, 7, 7), (47, 0, 5), (300, 61, 64)):
        x = fresh_heads(rows * heads, dim, position).view(rows, heads, 2, dim).unbind(2)
        seen = [part.contiguous() for part in x]
        wanted = Heads(seen[0], *(part.clone() for part in seen))
        chunk = chunk_of(position, tokens, table)
        defined.store(1, chunk, wanted)
        code.store(*map(place, seen), place(pool.tensor), place(table), place(chunk.place), 1, rows)
        assert torch.equal(pool.tensor, wanted_pool.tensor)
        for own, other in zip(seen, (wanted.keys, wanted.values), strict=True):
            if tokens:
                assert torch.equal(own, other)
    for position, tokens in ((0, 47), (300, 61), (340, 1), (0, 0)):
        for layer, window in ((1, 100), (0, 0)):
            chunk, room = chunk_of(position, tokens, table), position + tokens + 9
            gathered = torch.full((2, room, heads, dim), UNTOUCHED).bfloat16()
            wanted_rows = gathered.clone()
            defined.gather(layer, chunk, *wanted_rows)
            for blocks in (1, 3):
                seen_rows = gathered.clone()
                code.gather(
                    place(pool.tensor), place(table), place(chunk.place), layer, window,
                    *map(place, seen_rows), blocks,
                )  # fmt: skip
                assert torch.equal(seen_rows, wanted_rows)


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("nvidia") is None,
    reason="needs cuda-bindings and nvidia-cuda-nvrtc",
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("shape", SHAPES)
@NAMES
def test_the_kernels_compile_cleanly(name: KvName, shape: str, arch: str) -> None:
    cubin = compile_source(coded_pages_source(pool_of(config_of(shape), name).layout), arch)
    for entry in (STORE_ENTRY, GATHER_ENTRY):
        require_clean(cubin, entry, 0, 48 * 1024)
