"""Fixtures of several test modules."""

import pytest

from unit.engine.test_loop import Parts


@pytest.fixture
def parts():
    made: list[Parts] = []

    def make(**options) -> Parts:
        made.append(Parts(**options))
        return made[-1]

    yield make
    for p in made:
        p.loop.close()
        if p.loop.failure is None:
            cached = p.executor.cached.on_device // 64
            assert p.num_free_pages + cached == p.num_pages, "every page came back"
            assert not p.decoder.is_running
