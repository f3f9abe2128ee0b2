"""Time attention straight from KV pages against the library: `python benchmarks/page_attention.py`.

One Hopper GPU. A layer's queries of a pass attend to a sequence in scattered pages: by Soloist's
kernel, in splits of so many positions, and by the library after the pages were gathered. Each is
launched so often that a sequence's pages come from memory, in a CUDA graph; layers take turns.

`--compile` builds all kernels into the cache and needs no GPU: do it before a GPU is borrowed.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from soloist.jit.cache import load_or_build
from soloist.kv.layout import PAGE_POSITIONS, KvLayout
from soloist.kv.pool import PagePool
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.kv_format import PAGE_FORMATS
from soloist.prefill.attention import attend_packed
from soloist.prefill.elementwise import Chunk
from soloist.prefill.page_attention import PageAttention
from soloist.prefill.page_form import ARCH, PageForm
from soloist.prefill.upload import Upload
from soloist.settings import read_settings

SHAPES = ("llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama", "llama-3.1-8b")
# New tokens, and positions with them.
PASSES = ((16, 32_000), (160, 100_000), (256, 32_000), (928, 100_000), (2048, 2048), (2048, 66_000))
SPLITS = (1024, 2048, 4096, 8192)
_FOLDER = Path(__file__).parent / "shapes"
_LAYERS, _REPLAYS = 3, 10


def main(given: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--splits", nargs="+", type=int, default=SPLITS)
    parser.add_argument("--compile", action="store_true", help="kernels into the cache, no GPU")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args(given)
    forms = {name: [form_of(name, keys) for keys in asked.splits] for name in asked.shapes}
    if asked.compile:
        for form in (form for of_shape in forms.values() for form in of_shape):
            load_or_build(form.source, ARCH, read_settings().cache)
        return 0
    rows = [
        row for name in asked.shapes for tokens, stop in PASSES
        for row in _measured(name, forms[name], tokens, stop)
    ]  # fmt: skip
    if asked.output:
        asked.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def form_of(name: str, split_keys: int) -> PageForm:
    """The kernel for a few layers of a shape, in bf16."""
    a = read_config(_FOLDER / f"{name}.json").layers[0].attention
    layout = KvLayout(_LAYERS, a.num_kv_heads, a.head_dim, PAGE_FORMATS[Dtype.BF16])
    return PageForm(layout, a.num_query_heads // a.num_kv_heads, Dtype.BF16, split_keys)


def _measured(
    name: str, forms: Sequence[PageForm], tokens: int, stop: int
) -> list[dict[str, object]]:
    device, layout = torch.device("cuda", 0), forms[0].layout
    num_pages = -(-stop // PAGE_POSITIONS)
    pool = PagePool(
        _LAYERS, layout.num_heads, layout.head_dim, num_pages, torch.bfloat16, device
    )  # fmt: skip
    pool.tensor.normal_()
    table = torch.randperm(num_pages).int()
    chunk = Upload(num_pages, tokens, device).chunk(
        torch.zeros(tokens).int(), stop - tokens, table, tokens
    )
    heads = layout.num_heads * forms[0].group
    queries = torch.randn(tokens, heads, layout.head_dim, device=device).bfloat16()
    out = torch.empty_like(queries)
    seen = sum(stop - tokens + i + 1 for i in range(tokens))
    flop, num_bytes = 4 * heads * layout.head_dim * seen, layout.pool_bytes(num_pages) // _LAYERS
    rows: list[dict[str, object]] = []

    def told(way: str, launch: Callable[[int], object]) -> None:
        us = _time_us(launch)
        rows.append({"shape": name, "tokens": tokens, "stop": stop, "way": way, "us": us})
        speed, read = flop / us / 1e6, num_bytes / us / 1e3
        print(f"{name:24} {tokens:5} of {stop:7,} {way:16} {us:9.1f} µs {speed:6.0f} TFLOP/s "
              f"{read:6.0f} GB/s")  # fmt: skip

    told("library", lambda layer: _library(pool, layer, chunk, queries, stop))
    for form in forms:
        kernel = PageAttention(form, pool, read_settings().cache)

        def launch(layer: int, kernel: PageAttention = kernel) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            kernel.launch(queries, chunk, chunk.query_bounds, layer, None, out, stream)

        told(f"splits of {form.split_keys}", launch)
    return rows


def _library(pool: PagePool, layer: int, chunk: Chunk, queries: Tensor, stop: int) -> Tensor:
    """As passes have it: keys and values in rows, then FlashAttention; gathered by torch here."""
    keys, values = (
        x.transpose(0, 1).contiguous() for x in pool.read(layer, chunk.page_table, 0, stop)
    )
    return attend_packed(
        queries, keys, values, chunk.query_bounds, chunk.key_bounds, stop, window=None
    )


def _time_us(launch: Callable[[int], object]) -> float:
    """Of one launch, of several in a graph."""
    for layer in range(_LAYERS):
        launch(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(_LAYERS):
            launch(layer)
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _LAYERS)
    return median(times)


if __name__ == "__main__":
    raise SystemExit(main())
