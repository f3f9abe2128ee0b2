"""Which kernels round prompts' keys and values into pages of codes, and read them. Pure.

Of `cuda/kernels/coded_pages.cu`.
"""

from soloist.jit.source import Source
from soloist.kv.chunks import LEAST_CHUNK_TOKENS
from soloist.kv.layout import KvLayout, page_constants
from soloist.prefill.header import THREADS

KERNEL = "kernels/coded_pages.cu"
STORE_ENTRY, GATHER_ENTRY = "round_store", "gather_codes"
# Heads of positions that a block has at once.
BLOCK_HEADS = THREADS // 32


def coded_pages_source(layout: KvLayout) -> Source:
    """The kernels for pages of codes, beside activations in bf16."""
    assert not layout.format.is_plain, "codes"
    counts = {
        "kThreads": THREADS, "kLayers": layout.num_layers, "kBlockPositions": LEAST_CHUNK_TOKENS
    }  # fmt: skip
    lines = [
        "// Generated from the layout of KV pages; see prefill/coded_pages.py.",
        "#pragma once",
        '#include "ptx/types.cuh"',
        "constexpr bool kBf16 = true;",
        *(f"constexpr unsigned {name} = {value}u;" for name, value in counts.items()),
        *page_constants(),
        "struct Pages {",
        f"static constexpr unsigned kHeadDim = {layout.head_dim}u;",
        *layout.members("static "),
        "};",
        "",
    ]
    return Source(KERNEL, "\n".join(lines))
