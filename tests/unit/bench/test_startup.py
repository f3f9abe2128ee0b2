"""Seconds of starting that go to compiling."""

import pytest

from soloist.bench.startup import covered_s


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 4.0)], 3.0),
        ([(5.0, 6.0), (1.0, 4.0)], 4.0),
        ([(1.0, 4.0), (2.0, 6.0)], 5.0),
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 5.0)], 8.0),
    ],
    ids=["none", "one", "apart", "overlapping", "within"],
)
def test_kernels_that_are_compiled_at_once_count_once(spans, seconds) -> None:
    assert covered_s(spans) == seconds
