"""`soloist compile`: kernels in a folder, ahead of a model's first start."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from soloist.engine import Engine, EngineConfig
from soloist.engine.compiling import kernel_sources
from soloist.errors import CudaMissing
from soloist.jit import cache
from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import Cubin, Report
from soloist.kv.pool import PagePool
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.folder import find_model
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format
from soloist.prefill.coded_pages import coded_pages_source
from soloist.prefill.page_form import page_form
from soloist.prefill.sources import prefill_sources

KINDS = (
    "decoding up to 8 query tokens, greedy", "decoding one query token, greedy",
    "decoding up to 8 query tokens, sampling", "decoding one query token, sampling",
    "decoding with drafts, greedy", "decoding with drafts, sampling",
    "prompts, prefill", "prompts, gate_up", "prompts, attend_pages", "memory bandwidth",
)  # fmt: skip


# Of prompts from packed weights on Hopper: products of tiles of several sizes, and what is beside.
PACKED = ("prompts, packed_product", "prompts, packed_rows")


def others(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in PACKED]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(kernel, architecture) of all that is compiled, in no time."""
    try:
        nvrtc()
    except CudaMissing as error:
        pytest.skip(f"no NVRTC: {error.message}")
    found: list[tuple[str, str]] = []

    def compile_source(source: object, arch: str) -> Cubin:
        found.append((source.kernel, arch))
        return Cubin(b"code", Report({}, ()), "log", arch)

    monkeypatch.setattr(cache, "compile_source", compile_source)
    return found


def etude(name: str = "etude") -> ModelConfig:
    return read_config(find_model(name) / "config.json")


def test_a_folder_is_filled_once(soloist, tmp_path, compiled) -> None:
    folder = tmp_path / "kernels of an image"
    given = ("compile", "etude", "--arch", "sm_90a", "-o", folder)
    first = soloist(*given)
    assert first.status == 0
    assert f"etude · bf16 · sm_90a, 132 SMs · {folder}" in first.err
    names = [line.partition("  ")[0] for line in first.out.splitlines()[1:]]
    assert others(names) == list(KINDS)
    assert set(names) == {*KINDS, *PACKED}
    assert sorted(set(compiled)) == [
        ("kernels/attend_pages.cu", "sm_90a"), ("kernels/decode.cu", "sm_90a"),
        ("kernels/gate_up.cu", "sm_90a"), ("kernels/packed_product.cu", "sm_90a"),
        ("kernels/packed_rows.cu", "sm_90a"), ("kernels/prefill.cu", "sm_90a"),
        ("kernels/read.cu", "sm_90a"),
    ]  # fmt: skip
    assert len(compiled) == len(list(folder.glob("kernels/*/kernel.cubin"))) == len(names)
    again = json.loads(soloist(*given, "--json").out)
    assert (again["folder"], again["arch"], again["num_sms"]) == (str(folder), "sm_90a", 132)
    assert all(kernel["was_kept"] and kernel["num_bytes"] == 4 for kernel in again["kernels"])
    assert len(compiled) == len(names)


def test_the_users_own_cache(soloist, tmp_path, compiled, monkeypatch) -> None:
    monkeypatch.setenv("SOLOIST_CACHE", str(tmp_path))
    assert soloist("compile", "--arch", "sm_89", "--json").status == 0
    assert len(list(tmp_path.glob("kernels/*/build.json"))) == len(compiled)
    # Without two that are Hopper's, and with what unpacks matrices for a library.
    kernels = [kernel for kernel, _ in compiled]
    assert (unpacks := kernels.count("kernels/unpack.cu"))
    assert len(kernels) - unpacks == len(KINDS) - 2


@pytest.mark.parametrize(
    "option",
    [("--sms", 8), ("--gpus", 2), ("--precision", "fp16"), ("--weights", "int4"),
     ("--head-weights", "int8"), ("--kv", "fp8")],
)  # fmt: skip
@pytest.mark.usefixtures("compiled")
def test_what_makes_other_kernels(soloist, tmp_path, option) -> None:
    given = ("compile", "etude-draft", "--arch", "sm_90a", "-o", tmp_path, "--json")
    assert soloist(*given).status == 0
    found = json.loads(soloist(*given, *option).out)["kernels"]
    assert {k["name"] for k in found if not k["was_kept"]} >= set(KINDS[:4])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--arch", "sm_75"), "--arch is 'sm_75' (allowed: sm_80, sm_86"),
        (("--arch", "sm_90a", "--sms", "0"), "--sms is 0 (allowed: 1 … 1024)"),
        (("--arch", "sm_90a", "--gpus", "3"), "--gpus is '3' (allowed: 1, 2, 4, 8)"),
        (("--arch", "sm_90a", "--precision", "fp32"), "nothing to compile: the decode kernel"),
        (("--arch", "sm_90a", "--gpus", "auto"), "--gpus is 'auto'"),
        (("--arch", "sm_90a", "--kv", "int3"), "--kv is 'int3' (allowed: int8, fp8, int4)"),
        (
            ("--arch", "sm_90a", "--kv", "int4", "--precision", "fp16"),
            "--kv is 'int4', but",
        ),
    ],
)
def test_what_is_refused(soloist, tmp_path, given, said) -> None:
    outcome = soloist("compile", "etude", "-o", tmp_path / "none", *given)
    assert outcome.status in (2, 3)
    assert said in outcome.err
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to compile for")
def test_without_a_gpu_the_architecture_is_named(soloist) -> None:
    outcome = soloist("compile")
    assert outcome.status == 2
    assert "--arch is 'missing'" in outcome.err


@pytest.mark.usefixtures("compiled")
def test_a_folder_that_cannot_be_written(soloist, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    outcome = soloist("compile", "--arch", "sm_90a", "-o", tmp_path / "file")
    assert outcome.status == 3
    assert "cannot be written: compiled kernels cannot be kept there" in outcome.err


def test_each_source_is_named_once() -> None:
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"])
    sources = list(kernel_sources(plan))
    assert others(named.name for named in sources) == list(KINDS)
    assert len({named.source for named in sources}) == len(sources)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_codes_of_keys_and_values_have_a_kernel_more(name: KvName) -> None:
    """And it is the one that prefill asks for."""
    kv = kv_format(name, etude(), Dtype.BF16)
    plan = make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"], kv=kv)
    sources = list(kernel_sources(plan))
    kinds = [kind.replace("attend_pages", "attend_first") for kind in KINDS]
    names = [named.name for named in sources]
    assert others(names) == [*kinds[:-1], "prompts, coded_pages", kinds[-1]]
    a = etude().layers[0].attention
    pool = PagePool(
        etude().num_layers, a.num_kv_heads, a.head_dim, 1, torch.bfloat16, torch.device("cpu"), kv
    )
    coded = sources[names.index("prompts, coded_pages")].source
    assert coded == coded_pages_source(pool.layout)


def test_kernels_of_prompts_by_architecture() -> None:
    """Hopper alone has kernels of its own for attention and for gate_up of whole tiles."""
    pages = page_form(make_plan(etude(), Dtype.BF16, TYPICAL["sm_90a"]))
    for arch, pages_of, names in (
        ("sm_90a", pages, ("prefill", "gate_up", "attend_pages")),
        ("sm_90a", None, ("prefill", "gate_up", "attend_first")),
        ("sm_80", None, ("prefill",)),
    ):
        found = prefill_sources(etude(), Dtype.BF16, arch, pages=pages_of).all
        assert tuple(Path(source.kernel).stem for source in found) == names


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_is_what_a_start_loads(ranks: int) -> None:
    """From KV pages where that runs, and only there."""
    for arch in TYPICAL:
        plan = make_plan(etude(), Dtype.BF16, TYPICAL[arch], ranks)
        of_attention = [
            named.source for named in kernel_sources(plan) if "attend" in named.source.kernel
        ]
        form = page_form(plan)
        assert (form is not None) == (arch == "sm_90a")
        assert of_attention == ([] if form is None else [form.source])


@pytest.mark.gpu
@pytest.mark.parametrize("kv", [None, "int8"])
def test_a_start_compiles_nothing(soloist, tmp_path: Path, monkeypatch, kv: KvName | None) -> None:
    """On the GPU that they were compiled for."""
    monkeypatch.setenv("SOLOIST_CACHE", str(tmp_path))
    assert soloist("compile", "etude-draft", *(("--kv", kv) if kv else ())).status == 0
    before = set(tmp_path.glob("kernels/*"))
    engine = Engine.load(EngineConfig("etude-draft", measures_bandwidth=True, kv=kv))
    assert engine.report.executor == "decode kernel"
    assert set(tmp_path.glob("kernels/*")) == before
