"""All kernels of a model, compiled ahead of its first start; no GPU is needed.

They are the ones that `Engine.load` asks the cache for, and so does a machine whose GPU is the one
they were compiled for: of the same architecture, with as many SMs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from soloist.engine.bandwidth import bandwidth_source
from soloist.errors import NotWritten
from soloist.jit.cache import is_kept, load_or_build
from soloist.jit.source import Source
from soloist.megakernel.header import Build
from soloist.megakernel.kernel import decode_sources, drafting_sources
from soloist.megakernel.plan import Plan
from soloist.prefill.coded_pages import coded_pages_source
from soloist.prefill.expert_form import expert_sources, reads_packed_experts
from soloist.prefill.packed_choice import FormChoice, packed_sources
from soloist.prefill.packed_prompts import packs_prompts
from soloist.prefill.page_form import page_form
from soloist.prefill.part import config_of
from soloist.prefill.sources import prefill_sources
from soloist.prefill.unpacked_matrices import unpack_sources

# As requests run it: the second one where any of them samples.
_BUILDS = {"greedy": Build(), "sampling": Build(samples=True)}


@dataclass(frozen=True, slots=True)
class NamedSource:
    """What is compiled.

    Attributes:
        name: for people.
        source: of the kernel.
    """

    name: str
    source: Source


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel in the cache.

    Attributes:
        name: for people.
        seconds: that compiling it took; 0 where it was there.
        num_bytes: of machine code.
        was_kept: it was in the cache before.
    """

    name: str
    seconds: float
    num_bytes: int
    was_kept: bool


def kernel_sources(plan: Plan) -> Iterator[NamedSource]:
    """Everything that is compiled for a model's plan, what takes longest first.

    As prompts are read where nobody asks for another way.
    """
    for build, options in _BUILDS.items():
        single, several = decode_sources(plan, options)
        yield NamedSource(f"decoding up to 8 query tokens, {build}", several)
        yield NamedSource(f"decoding one query token, {build}", single)
    for build, source in zip(_BUILDS, drafting_sources(plan, Build()), strict=True):
        yield NamedSource(f"decoding with drafts, {build}", source)
    prefill = prefill_sources(
        config_of(plan.part_of(0)), plan.dtype, plan.gpu.arch, plan.ranks, page_form(plan)
    )
    experts = expert_sources(plan) if reads_packed_experts(plan) else ()
    coded = () if plan.kv is None else (coded_pages_source(plan.kv_layout),)
    products = packed_sources(FormChoice(plan)) if packs_prompts(plan) else unpack_sources(plan)
    for source in (*prefill.all, *experts, *coded, *products):
        yield NamedSource(f"prompts, {Path(source.kernel).stem}", source)
    yield NamedSource("memory bandwidth", bandwidth_source())


def compile_kernels(
    plan: Plan, cache_root: Path, threads: int, on_kernel: Callable[[CompiledKernel], None]
) -> Sequence[CompiledKernel]:
    """Compile what the cache lacks.

    Args:
        plan: of the model on the GPU that it is for.
        cache_root: where compiled kernels are kept.
        threads: kernels that are compiled at the same time.
        on_kernel: told of each, in the order of `kernel_sources`.

    Raises:
        DeviceError: a kernel cannot be compiled.
        NotWritten: compiled kernels cannot be kept there.
    """

    def compiled(named: NamedSource) -> CompiledKernel:
        was_kept = is_kept(named.source, plan.gpu.arch, cache_root)
        start = time.perf_counter()
        cubin = load_or_build(named.source, plan.gpu.arch, cache_root)
        if not was_kept and not is_kept(named.source, plan.gpu.arch, cache_root):
            raise NotWritten(str(cache_root), "compiled kernels cannot be kept there")
        seconds = 0.0 if was_kept else time.perf_counter() - start
        return CompiledKernel(named.name, seconds, len(cubin.data), was_kept)

    found = []
    with ThreadPoolExecutor(threads, "soloist-compile") as pool:
        for kernel in pool.map(compiled, kernel_sources(plan)):
            on_kernel(kernel)
            found.append(kernel)
    return found
