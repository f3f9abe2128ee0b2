"""Rounds of drafting and checking against sums by hand and recorded queries."""

import json
from pathlib import Path

import pytest

from soloist.errors import SettingError
from soloist.planning.bill import Costs, bill
from soloist.planning.bounds import prompt_cost, step_cost
from soloist.planning.cost import ApiPrices, Machine, Work
from soloist.planning.expectation import PROMPT_LAYER_S, PROMPT_START_S, expect, prompt_s
from soloist.planning.hardware import find_hardware
from soloist.planning.model import Model
from soloist.planning.precision import SIXTEEN_BIT, find_precision
from soloist.planning.reach import Subject, bytes_per_gpu, longest_context, reach
from soloist.planning.reading import read_model
from soloist.planning.speculation import Speculation, expect_round, read_speculation

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
H200, RUBIN = find_hardware("H200"), find_hardware("Rubin")


def shape(name: str) -> Model:
    return read_model(BENCHMARKS / "shapes" / f"{name}.json")


def recorded() -> list[dict]:
    rows = json.loads((BENCHMARKS / "results/h200.json").read_text())
    return [row for row in rows if row.get("bench", "decode") == "decode"]


def test_tokens_of_a_round() -> None:
    assert Speculation(3, 0.5).tokens_per_round == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert Speculation(7, 0.0).tokens_per_round == 1
    assert Speculation(7, 1.0).tokens_per_round == 8


def test_steps_of_eight_columns_are_met_within_6_percent() -> None:
    rows = [row for row in recorded() if row["columns"] == 8 and row["sequences"] == 1]
    assert len(rows) >= 4
    for row in rows:
        seen = row["start_position"] + row["new_tokens"] // 2
        cost = step_cost(shape(row["shape"]), SIXTEEN_BIT, seen, queries=8)
        expected_s = expect(cost, H200, 1, queries=8).token_s
        measured_s = 8 / row["decode_tokens_per_s"]["median"]
        assert expected_s == pytest.approx(measured_s, rel=0.06), row["shape"]


def test_a_round_with_a_draft_model() -> None:
    model, draft = shape("llama-3.1-8b"), shape("llama-3.2-1b")
    made = expect_round(model, SIXTEEN_BIT, 2000, Speculation(4, 0.7, draft), H200, 1)
    of_draft = step_cost(draft, SIXTEEN_BIT, 2000)
    assert made.draft_s == pytest.approx(4 * expect(of_draft, H200, 1).token_s)
    assert made.tokens == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    alone = expect(step_cost(model, SIXTEEN_BIT, 2000), H200, 1)
    # Weights and cache are read once for all queries; each layer waits 3.2 µs longer.
    assert made.check.stream_s == alone.stream_s
    assert made.check.token_s == pytest.approx(alone.token_s + 32 * 3.2e-6)
    assert made.tokens_per_s == pytest.approx(made.tokens / (made.draft_s + made.check.token_s))


def test_drafts_that_never_stand_only_cost() -> None:
    model = shape("llama-3.1-8b")
    made = expect_round(model, SIXTEEN_BIT, 2000, Speculation(7, 0.0), H200, 1)
    alone = expect(step_cost(model, SIXTEEN_BIT, 2000), H200, 1)
    assert made.tokens_per_s < 1 / alone.token_s


def test_what_options_say_and_what_is_assumed() -> None:
    looked_up, drafted = (
        read_speculation(None, None, None),
        read_speculation(shape("llama-3.2-1b"), None, None),
    )
    assert (looked_up.drafts, looked_up.acceptance, looked_up.is_assumed) == (7, 0.3, True)
    assert (drafted.drafts, drafted.acceptance, drafted.is_assumed) == (4, 0.7, True)
    assert not read_speculation(None, 2, 0.5).is_assumed
    for drafts, acceptance in ((0, 0.5), (8, 0.5), (3, -0.1), (3, 1.1)):
        with pytest.raises(SettingError):
            read_speculation(None, drafts, acceptance)


def test_a_draft_takes_room() -> None:
    model, draft = shape("llama-3.1-8b"), shape("llama-3.2-1b")
    plain = Subject(model, H200, 8192)
    with_draft = Subject(model, H200, 8192, speculation=Speculation(4, 0.7, draft))
    draft_bytes = 2 * sum(s.num_values for s in draft.specs) + 8192 * 2 * 16 * 8 * 64 * 2
    assert with_draft.draft_bytes == draft_bytes
    more = bytes_per_gpu(with_draft, SIXTEEN_BIT, 1) - bytes_per_gpu(plain, SIXTEEN_BIT, 1)
    assert more == draft_bytes
    tight = Subject(model, find_hardware("RTX 4090"), 8192,
        speculation=Speculation(4, 0.7, draft),
    )  # fmt: skip
    longest = longest_context(tight, SIXTEEN_BIT, 1)
    at_most = Subject(model, tight.hardware, longest, speculation=tight.speculation)
    assert reach(at_most, SIXTEEN_BIT, 1).fits
    longer = Subject(model, tight.hardware, longest + 1, speculation=tight.speculation)
    assert not reach(longer, SIXTEEN_BIT, 1).fits


def test_recorded_times_to_first_token_are_met_within_15_percent() -> None:
    rows = [row for row in recorded() if row["columns"] == 1 and row["prompt_tokens"] >= 128]
    assert {row["prompt_tokens"] for row in rows} == {128, 2048}
    for row in rows:
        model = shape(row["shape"])
        cost = prompt_cost(model, SIXTEEN_BIT, row["prompt_tokens"])
        expected_s = prompt_s(cost, model.num_layers, H200, 1)
        assert expected_s == pytest.approx(row["ttft_ms"]["median"] / 1e3, rel=0.15), row["shape"]


def test_reading_a_prompt_leaves_the_head_out() -> None:
    model = shape("llama-3.1-8b")
    cost = prompt_cost(model, SIXTEEN_BIT, 2000)
    layers = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336) + 65 * 4096
    assert cost.weight_bytes == 2 * layers
    assert cost.flops == 2000 * (2 * layers + 4 * 32 * 128 * 1000 * 32)
    expected = PROMPT_START_S + 32 * PROMPT_LAYER_S + cost.flops / (0.76 * 989e12)
    assert prompt_s(cost, 32, H200, 1) == pytest.approx(expected)
    assert prompt_s(cost, 32, RUBIN, 1) is None


def test_a_bill_by_hand() -> None:
    model = shape("llama-3.1-8b")
    speculation = Speculation(7, 0.3)
    subject = Subject(model, H200, 8192, speculation=speculation)
    row = reach(subject, SIXTEEN_BIT, 2)
    costs = Costs(Machine(3.6, 0.5), Work(2000, 200), ApiPrices(0.5, 0.5, 1.5))
    made = bill(subject, row, costs)
    # Two GPUs at 3.6 an hour, used half of the time: 0.4 cents a second.
    assert made.machine.price_per_hour == 7.2
    assert made.thousand_tokens == pytest.approx(1000 * row.expected.token_s * 0.004)
    assert made.step_s == pytest.approx(made.read_s + 200 * row.expected.token_s)
    assert made.step == pytest.approx(made.step_s * 0.004)
    assert row.speculating is not None
    faster = made.read_s + 200 / row.speculating.tokens_per_s
    assert made.step_speculating == pytest.approx(faster * 0.004)
    assert made.api_step == pytest.approx(2000 * 0.5e-6 + 200 * 1.5e-6)
    unknown = bill(
        Subject(model, RUBIN, 8192),
        reach(Subject(model, RUBIN, 8192), find_precision("fp8"), 1),
        costs,
    )
    assert (unknown.read_s, unknown.step, unknown.step_speculating) == (None, None, None)
