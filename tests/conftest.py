"""Settings for all tests.

One thread a process, since pytest-xdist already uses every core; what takes many minutes runs with
`-m slow` only. Properties have no deadline: a busy machine is slow now and then.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)
    if find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("soloist", deadline=None)
        settings.load_profile("soloist")


def pytest_addoption(parser: pytest.Parser) -> None:
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
    return True if any(f"mark.{word}" not in text for word in demanded) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="one of many that take minutes: -m slow"))


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
