"""What `bench accuracy` refuses to measure of prompts, before anything is loaded."""

from dataclasses import replace

import pytest

from soloist.bench.accuracy import Plan, measure
from soloist.errors import SettingError

PLAN = Plan(
    model="nowhere",
    shape=None,
    text=None,
    positions=64,
    against=None,
    repeats=0,
    device="cpu",
    precision="bf16",
)


def require_refused(plan: Plan, option: str, *words: str) -> None:
    with pytest.raises(SettingError) as refused:
        measure(plan)
    told = f"{refused.value} {refused.value.hint}"
    assert told.startswith(f"{option} is ")
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("plan", "option"),
    [
        (replace(PLAN, packed_prompts=True), "--packed-prompts"),
        (replace(PLAN, packed_prompts=False), "--no-packed-prompts"),
        (replace(PLAN, packed_prompts=True, eight_bit_prompts=True), "--eight-bit-prompts"),
    ],
)
def test_ways_of_reading_prompts_change_no_other_row(plan: Plan, option: str) -> None:
    require_refused(plan, option, "only with --prompts", "add --prompts")


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("packed", [None, False])
def test_eight_bits_take_packed_weights(prompts: bool, packed: bool | None) -> None:
    plan = replace(PLAN, prompts=prompts, packed_prompts=packed, eight_bit_prompts=True)
    require_refused(plan, "--eight-bit-prompts", "add --packed-prompts")


def test_one_pass_has_all_positions() -> None:
    long = replace(PLAN, positions=2049)
    require_refused(replace(long, prompts=True), "--positions", "at most 2,048 with --prompts")


@pytest.mark.parametrize(
    ("plan", "option"),
    [
        (replace(PLAN, prompts=True, positions=2048), "--prompts"),
        (replace(PLAN, prompts=True, packed_prompts=True), "--prompts"),
        (replace(PLAN, repeats=3), "--repeats"),
    ],
)
def test_the_reference_has_no_such_passes(plan: Plan, option: str) -> None:
    require_refused(plan, option, "on the decode kernel only", f"leave out {option}")
