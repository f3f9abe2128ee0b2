"""What a digest covers, and which files a kernel may include."""

from pathlib import Path

import pytest

from soloist.errors import BadInclude
from soloist.jit import source as source_module
from soloist.jit.source import CUDA_ROOT, Source
from unit.jit.small import HEADER, one_file, small_source

OPTIONS = ("--std=c++17", "-lineinfo")
VERSION = (13, 0)


def digest(source: Source) -> str:
    return source.digest("sm_90a", OPTIONS, VERSION)


def test_headers_are_what_is_included_directly_or_not(tmp_path: Path) -> None:
    headers = small_source(tmp_path).headers
    assert list(headers) == ["ops/scale.cuh", "ptx/types.cuh", "spec.cuh"]
    assert headers["spec.cuh"] == HEADER


def test_the_generated_header_may_include_files(tmp_path: Path) -> None:
    source = small_source(tmp_path, header='#include "ptx/unused.cuh"\n')
    assert "ptx/unused.cuh" in source.headers


def test_files_that_include_each_other_end(tmp_path: Path) -> None:
    source = small_source(tmp_path, types='#pragma once\n#include "ops/scale.cuh"\n')
    assert set(source.headers) == {"ops/scale.cuh", "ptx/types.cuh", "spec.cuh"}


def test_the_digest_changes_with_each_ingredient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_source(tmp_path / "plain")
    small_source(tmp_path / "renamed")
    (tmp_path / "renamed/kernels/scale.cu").rename(tmp_path / "renamed/kernels/other.cu")
    digests = {
        digest(plain),
        plain.digest("sm_90", OPTIONS, VERSION),
        plain.digest("sm_90a", OPTIONS[:1], VERSION),
        plain.digest("sm_90a", OPTIONS, (13, 1)),
        digest(small_source(tmp_path / "header", header=HEADER + " ")),
        digest(small_source(tmp_path / "deep", types="#pragma once\nusing f32 = double;\n")),
        digest(Source("kernels/other.cu", HEADER, tmp_path / "renamed")),
    }
    (tmp_path / "plain/kernels/scale.cu").write_text("// another entry file\n")
    digests.add(digest(Source("kernels/scale.cu", HEADER, tmp_path / "plain")))
    monkeypatch.setattr(source_module, "_WRITER_VERSION", 2)
    digests.add(digest(small_source(tmp_path / "writer")))
    assert len(digests) == 9


def test_the_digest_ignores_place_order_and_files_not_included(tmp_path: Path) -> None:
    here = small_source(tmp_path / "here")
    there = small_source(tmp_path / "there", unused="// nobody reads this\n")
    assert digest(here) == digest(there)
    backwards = small_source(tmp_path / "here")
    backwards.__dict__["headers"] = dict(reversed(here.headers.items()))
    assert list(backwards.headers) != list(here.headers)
    assert digest(backwards) == digest(here)


@pytest.mark.parametrize(
    ("directive", "named", "reason"),
    [
        ('#include "../outside.cuh"', "../outside.cuh", "outside"),
        ('#include "ops/../../outside.cuh"', "outside.cuh", "outside"),
        ("#include <cuda_fp16.h>", "<cuda_fp16.h>", "toolkit"),
        ("# include NAME", "NAME", "toolkit"),
        ('#include "absent.cuh"', "absent.cuh", "No such file"),
        ('#include "types.cuh"', "types.cuh", "No such file"),  # beside the includer is not enough
    ],
)
def test_an_include_outside_the_root_is_refused(
    tmp_path: Path, directive: str, named: str, reason: str
) -> None:
    (tmp_path / "outside.cuh").write_text("")
    source = small_source(tmp_path / "root", types=directive + "\n")
    with pytest.raises(BadInclude) as refused:
        digest(source)
    assert "ptx/types.cuh" in str(refused.value)
    assert named in str(refused.value)
    assert reason in str(refused.value)


def test_an_absolute_path_and_a_link_out_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside.cuh"
    outside.write_text("")
    root = tmp_path / "root"
    with pytest.raises(BadInclude, match="outside the CUDA sources"):
        digest(one_file(root, f'#include "{outside}"\n'))
    (root / "link.cuh").symlink_to(outside)
    with pytest.raises(BadInclude, match="outside the CUDA sources"):
        digest(one_file(root, '#include "link.cuh"\n'))


def test_an_include_in_a_comment_is_none(tmp_path: Path) -> None:
    assert list(one_file(tmp_path, "// #include <stdio.h>\n").headers) == ["spec.cuh"]


def test_every_kernel_of_the_package_finds_its_files() -> None:
    kernels = list((CUDA_ROOT / "kernels").glob("*.cu"))
    assert kernels
    for kernel in kernels:
        assert "ptx/types.cuh" in Source(f"kernels/{kernel.name}", HEADER).headers
