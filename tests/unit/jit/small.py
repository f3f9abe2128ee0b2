"""A CUDA tree of a few lines."""

from pathlib import Path

from soloist.jit.source import Source

ARCH = "sm_90a"
HEADER = "#pragma once\nconstexpr int kScale = 3;\n"
FILES = {
    "kernels/scale.cu": (
        '#include "ops/scale.cuh"\n'
        'extern "C" __global__ void scale(float* values, int count) {\n'
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < count) values[i] = scaled(values[i]);\n"
        "}\n"
    ),
    "ops/scale.cuh": (
        '#pragma once\n#include "spec.cuh"\n  #  include  "ptx/types.cuh"  // for f32\n'
        "__device__ inline f32 scaled(f32 x) { return kScale * x; }\n"
    ),
    "ptx/types.cuh": '#pragma once\n#include "spec.cuh"\nusing f32 = float;\n',
    "ptx/unused.cuh": "#error this file is included by nobody\n",
}


def small_source(root: Path, header: str = HEADER, **changed: str) -> Source:
    """The tree above written below `root`; `changed` replaces a file's text, by its stem."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text) if path.suffix == ".cuh" else text)
    return Source("kernels/scale.cu", header, root)


def one_file(root: Path, text: str) -> Source:
    """A source that is one entry file."""
    path = root / "kernels" / "one.cu"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Source("kernels/one.cu", "", root)
