"""CUDA sources know only what lies below them; Python's are held by import-linter."""

import re
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "src" / "soloist" / "cuda"
# From the top; spec.cuh is generated and known to all.
LAYERS = ("kernels", "ops", "tile", "sync", "ptx")
SOURCES = sorted(CUDA.rglob("*.cu*"))


def layer_of(file: Path) -> str:
    return file.relative_to(CUDA).parts[0]


def test_every_source_has_a_layer() -> None:
    assert {layer_of(file) for file in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: f.name)
def test_includes_point_downwards(file) -> None:
    own = LAYERS.index(layer_of(file))
    for name in re.findall(r'^#include "([^"]+)"', file.read_text("utf-8"), re.MULTILINE):
        if name == "spec.cuh":
            continue
        layer = name.partition("/")[0]
        assert (CUDA / name).exists(), name
        assert LAYERS.index(layer) >= own, f"{name} lies above"
        assert layer != "kernels", "an entry point is nobody's part"


def test_no_circle_of_headers() -> None:
    needs = {
        str(file.relative_to(CUDA)): re.findall(
            r'^#include "(?!spec)([^"]+)"', file.read_text("utf-8"), re.MULTILINE
        )
        for file in SOURCES
    }
    done: set[str] = set()
    while left := [name for name, wants in needs.items() if name not in done]:
        ready = [name for name in left if done.issuperset(needs[name])]
        assert ready, f"these include each other: {left}"
        done.update(ready)
