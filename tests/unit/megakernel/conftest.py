"""Large shapes on all architectures take many minutes: it runs with `-m slow` only."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr:
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes many minutes; run with -m slow"))
