"""The decode kernel on a GPU: compiled, or taken from the cache, and loaded."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from soloist.jit.cache import load_or_build
from soloist.jit.compiler import Cubin
from soloist.jit.module import Module
from soloist.jit.source import Source
from soloist.megakernel.header import BUILT_FOR, Build, header
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan


def decode_sources(plan: Plan, build: Build) -> tuple[Source, ...]:
    """What is compiled for a build: a source for launches of one query, and one for more."""
    builds = (replace(build, queries=queries) for queries in BUILT_FOR)
    return tuple(Source("kernels/decode.cu", header(plan, b)) for b in builds)


def drafting_sources(plan: Plan, build: Build) -> tuple[Source, ...]:
    """What is compiled for launches that draft: a source for greedy ones, and one that samples."""
    builds = (
        replace(build, drafts=True, queries=MAX_QUERIES, samples=samples)
        for samples in (False, True)
    )
    return tuple(Source("kernels/decode.cu", header(plan, b)) for b in builds)


def load_drafting(
    plan: Plan, build: Build, device: torch.device, cache: Path | None
) -> tuple[Module, ...]:
    """The modules of `drafting_sources`; both compiled at the same time, or from the cache."""

    def built(source: Source) -> Cubin:
        return load_or_build(source, plan.gpu.arch, cache)

    sources = drafting_sources(plan, build)
    with ThreadPoolExecutor(len(sources), "soloist-compile") as pool:
        cubins = list(pool.map(built, sources))
    with torch.cuda.device(device):
        modules = tuple(Module(cubin, "decode") for cubin in cubins)
    for module in modules:
        module.make_ready(_shared_bytes(plan))
    return modules


def _shared_bytes(plan: Plan) -> int:
    """Dynamic shared memory of a block, enough for every build of the plan."""
    return max(
        plan.with_room_for(queries, samples=samples).shared.num_bytes
        for queries in BUILT_FOR
        for samples in (False, True)
    )


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """A build of the kernel, loaded twice: for launches of one query, and of more.

    Attributes:
        single: for one query.
        several: for up to eight.
        shared_bytes: dynamic shared memory of a block, enough for every build of the plan.
    """

    single: Module
    several: Module
    shared_bytes: int

    @classmethod
    def load(
        cls, plan: Plan, build: Build, device: torch.device, cache: Path | None
    ) -> "DecodeKernel":
        """Compile what the cache lacks, both at the same time; `build` is for any queries."""

        def built(source: Source) -> Cubin:
            return load_or_build(source, plan.gpu.arch, cache)

        with ThreadPoolExecutor(len(BUILT_FOR), "soloist-compile") as pool:
            cubins = list(pool.map(built, decode_sources(plan, build)))
        with torch.cuda.device(device):  # a module belongs to the context it is loaded in
            single, several = (Module(cubin, "decode") for cubin in cubins)
        shared_bytes = _shared_bytes(plan)
        # Now, since it may wait for all that runs on the GPU: another rank's kernel, say.
        for module in (single, several):
            module.make_ready(shared_bytes)
        return cls(single, several, shared_bytes)

    def module_for(self, num_queries: int) -> Module:
        """The one for launches of so many queries."""
        return self.single if num_queries == 1 else self.several
