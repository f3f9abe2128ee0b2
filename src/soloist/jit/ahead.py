"""Kernels that are compiled by other threads before anybody asks for them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from soloist.jit.cache import is_kept, load_or_build
from soloist.jit.source import Source

# A kernel takes one core for a second or more.
_MOST_THREADS = 8


@contextmanager
def built_beside(sources: Sequence[Source], arch: str, cache_root: Path | None) -> Iterator[None]:
    """Compile what the cache lacks while the block runs, and on until all of it is there.

    A kernel that cannot be compiled is left to who asks for it.

    Args:
        sources: what to compile.
        arch: as of `load_or_build`.
        cache_root: as of `load_or_build`; without one nothing is compiled here.
    """
    lacking = [s for s in sources if cache_root is not None and not is_kept(s, arch, cache_root)]
    if not lacking:
        yield
        return
    with ThreadPoolExecutor(min(len(lacking), _MOST_THREADS), "soloist-compile") as pool:
        for source in lacking:
            pool.submit(load_or_build, source, arch, cache_root)
        yield
