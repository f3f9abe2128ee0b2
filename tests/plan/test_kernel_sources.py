"""`kernel_sources` lists what GPU tests compile, and compiles it, where no GPU is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_sources
from interpreter.models import configured
from soloist.jit.cache import is_kept
from soloist.megakernel.header import Build
from soloist.megakernel.kernel import decode_sources

TESTS = Path(__file__).parents[1]
CASE = "test_two_models_in_one_kernel[qwen3-norms-128-then-llama-untied-biases-32-1]"


@pytest.mark.slow
def test_kernels_of_a_test_are_listed_and_compiled(tmp_path: Path) -> None:
    listed, kernels = tmp_path / "listed", tmp_path / "kernels"
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "kernel_sources",
            "--list-kernels", str(listed), "-m", "gpu", "-q",
            f"{TESTS}/end_to_end/test_gpu_two_models.py::{CASE}",
        ],
        cwd=TESTS.parent, env={**os.environ, "PYTHONPATH": path}, check=False, capture_output=True,
    )  # fmt: skip
    _, plan = configured("qwen3-norms-128", tmp_path)
    wanted = {s.digest(plan.gpu.arch, (), (0, 0)): s for s in decode_sources(plan, Build())}
    assert wanted.keys() <= {file.stem for file in listed.glob("*.json")}
    for file in listed.glob("*.json"):
        if file.stem not in wanted:
            file.unlink()
    assert kernel_sources.main(str(listed), str(kernels)) == 0
    assert all(is_kept(source, plan.gpu.arch, kernels) for source in wanted.values())
