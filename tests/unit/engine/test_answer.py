"""Figures of an answer, by a clock of the test."""

import pytest

from soloist.engine.answer import Answer
from soloist.sampling import Sampler, SamplingParams


@pytest.mark.parametrize(
    ("times", "longest"), [([5.0], 0.0), ([5.0, 5.1, 5.4, 5.5], 0.3), ([5.0, 5.2, 5.2], 0.2)]
)
def test_the_longest_gap_is_between_two_tokens(times: list[float], longest: float) -> None:
    """Neither before the first one, nor behind the last one."""
    sampler = Sampler(SamplingParams(max_tokens=9, ignore_eos=True), 50, [1, 2])
    answer = Answer(sampler, 2, accepted=1.0)
    for now in times:
        answer.take(7, None, now)
    _, end = answer.finish(99.0, 0)
    assert end.timings.longest_gap_s == pytest.approx(longest)
