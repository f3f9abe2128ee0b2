"""Settings for all tests.

One thread a process, since pytest-xdist already uses every core; what takes many minutes runs with
`-m slow` only. Properties have no deadline: a busy machine is slow now and then.
"""

import os
import random
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        # Models that tests load would take all cores each: 26 workers had 130 threads that ran.
        os.environ.setdefault("SOLOIST_THREADS", "1")
    if config.getoption("--one-gpu-each") and worker:
        # Before CUDA starts in this process, which reads it then.
        number = int(worker.removeprefix("gw")) % config.getoption("--one-gpu-each")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    if (folder := config.getoption("--kernels")) is not None:
        share_kernels(folder.resolve())
    if find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "soloist", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("soloist")


def share_kernels(folder: Path) -> None:
    """Have caches of all tests look into one folder before they compile."""
    from soloist.jit import cache
    from soloist.jit.compiler import Cubin
    from soloist.jit.source import Source

    compile_source = cache.compile_source
    within: list[Source] = []  # what is compiled for that folder now

    def kept(source: Source, arch: str) -> Cubin:
        if source in within:
            return compile_source(source, arch)
        within.append(source)
        try:
            return cache.load_or_build(source, arch, folder)
        finally:
            within.remove(source)

    cache.compile_source = kept


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-gpu-each",
        type=int,
        metavar="N",
        help="each worker sees one of N GPUs, in turn; not for tests that need several",
    )
    parser.addoption(
        "--kernels",
        type=Path,
        metavar="FOLDER",
        help="keep compiled kernels of all tests there: for other workers, and for the next run",
    )
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, instead of skip, where a test's GPUs are absent: green then means run",
    )
    parser.addoption(
        "--record-code-sizes",
        action="store_true",
        help="write what the decode kernel's code takes, instead of comparing it",
    )
    parser.addoption(
        "--record-bits",
        action="store_true",
        help="write hashes of what the decode kernel makes, instead of comparing them",
    )
    parser.addoption("--chaos-seed", help="what hostile clients do, as a failed test named it")
    parser.addoption(
        "--chaos-seconds", type=float, default=180, help="how long the long form lets them"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that never names a mark that `-m` demands has no such test: it is not imported."""
    demanded = [word for word in config.option.markexpr.split(" and ") if word.isidentifier()]
    if collection_path.suffix != ".py" or not demanded:
        return None
    text = collection_path.read_text(encoding="utf-8")
    # Of tests of which few run by default the others are slow.
    marks = [("slow", "few") if word == "slow" else (word,) for word in demanded]
    has_all = all(any(f"mark.{mark}" in text for mark in either) for either in marks)
    return None if has_all else True


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in _others_of_few(items):
        item.add_marker(pytest.mark.slow)
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="one of many that take minutes: -m slow"))


def _others_of_few(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests that are marked `few` that do not run by default: drawn by the test's name."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in by_test.items():
        marker = cases[0].get_closest_marker("few")
        assert marker is not None, "it was found"
        count = min(marker.args[0], len(cases))
        kept = set(random.Random(name).sample(range(len(cases)), count))
        yield from (item for number, item in enumerate(cases) if number not in kept)


def pytest_runtest_setup(item: pytest.Item) -> None:
    wanted = 1 if item.get_closest_marker("gpu") else 0
    if (marker := item.get_closest_marker("gpus")) is not None:
        wanted = marker.args[0]
    found = torch.cuda.device_count() if wanted else 0
    if found < wanted:
        reason = f"needs {wanted} CUDA device{'s' * (wanted > 1)}, found {found}"
        if item.config.getoption("--require-gpu"):
            pytest.fail(reason)
        pytest.skip(reason)
