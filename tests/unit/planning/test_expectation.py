"""Expected times against what was measured, and against sums by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from soloist.model.dtype import Dtype
from soloist.model.kv_format import KV_FORMATS, kv_format
from soloist.planning import expectation
from soloist.planning.bounds import Kind, StepCost, step_cost
from soloist.planning.expectation import Wall, expect, is_measured
from soloist.planning.hardware import find_hardware
from soloist.planning.precision import PRECISIONS, SIXTEEN_BIT
from soloist.planning.reading import read_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
H200, MI300X, RUBIN = (find_hardware(name) for name in ("H200", "MI300X", "Rubin"))


def test_recorded_speeds_of_one_gpu_are_met_within_6_percent():
    rows = json.loads((BENCHMARKS / "results/h200.json").read_text())
    rows = [r for r in rows if r.get("bench") == "decode" and r["columns"] == 1]
    assert rows
    for row in rows:
        model = read_model(BENCHMARKS / "shapes" / f"{row['shape']}.json")
        seen = row["start_position"] + row["new_tokens"] // 2
        cost = step_cost(model, SIXTEEN_BIT, seen)
        assert cost.num_bytes == pytest.approx(row["streamed_bytes_per_token"], rel=0.01)
        speed = 1 / expect(cost, H200, 1).token_s
        assert speed == pytest.approx(row["decode_tokens_per_s"]["median"], rel=0.06), row["shape"]


def test_recorded_speeds_with_keys_and_values_in_codes_are_met_within_9_percent():
    rows = json.loads((BENCHMARKS / "results/h200-kv.json").read_text())
    assert {row["kv"] for row in rows} == {"", *KV_FORMATS}
    assert max(row["start_position"] for row in rows) == 1_000_000
    for row in rows:
        words = row["command"].split()
        model = read_model(BENCHMARKS.parent / words[words.index("--shape") + 1])
        if row["kv"]:
            model = replace(model, kv=kv_format(row["kv"], model.config, Dtype.BF16))
        cost = step_cost(model, SIXTEEN_BIT, row["start_position"] + row["new_tokens"] // 2)
        assert cost.num_bytes == pytest.approx(row["streamed_bytes_per_token"], rel=0.01)
        speed = 1 / expect(cost, H200, 1).token_s
        told = row["kv"], row["start_position"]
        assert speed == pytest.approx(row["decode_tokens_per_s"]["median"], rel=0.09), told
        assert is_measured(cost.kind, H200, 1, cost.kv_name)
    assert not is_measured(Kind.DENSE, H200, 2, "int4")
    assert is_measured(Kind.DENSE, H200, 2)


def test_recorded_speeds_with_experts_are_met_within_6_percent():
    """And what the module's text tells of their waiting is what was recorded."""
    model, chains_us = read_model(BENCHMARKS / "shapes/qwen3-30b-a3b.json"), {1: [], 2: []}
    by_name = {"bf16": SIXTEEN_BIT} | {p.name: p for p in PRECISIONS}
    by_name["fp8-block"] = by_name["fp8"]  # whose scales are few bytes
    for gpus, file in ((1, "h200-experts.json"), (2, "2-h200-experts.json")):
        rows = json.loads((BENCHMARKS / "results" / file).read_text())
        for row in (r for r in rows if r["bench"] == "decode" and r["columns"] == 1):
            seen = row["start_position"] + row["new_tokens"] // 2
            cost = step_cost(model, by_name[row["weights"]], seen)
            assert cost.num_bytes == pytest.approx(row["streamed_bytes_per_token"], rel=0.015)
            speed, measured = 1 / expect(cost, H200, gpus).token_s, row["decode_tokens_per_s"]
            assert speed == pytest.approx(measured["median"], rel=0.06), (row["weights"], gpus)
            uncertain = (cost.num_bytes - cost.certain_bytes) / 4.44e12 / gpus
            if seen < 1000:
                chain = (1 / measured["median"] - uncertain) / cost.layers
                chains_us[gpus].append(chain * 1e6)
    low, *_, high = sorted(chains_us[1])
    assert f"take {low:.1f} to {high:.1f} µs a layer more" in told()
    assert f"On two GPUs it is {chains_us[2][0]:.1f} in bf16" in told()


def test_little_that_is_certain_hides_little_waiting():
    def waits_us(certain_bytes, kv_bytes=0):
        cost = StepCost(10**9, kv_bytes, 1e9, 10, Kind.EXPERTS, certain_bytes=certain_bytes)
        return expect(cost, H200, 1).wait_s / 10 * 1e6

    assert waits_us(0) == pytest.approx(12.8)
    assert waits_us(444_000_000) == pytest.approx(2.8)
    assert waits_us(888_000_000) == pytest.approx(2.0)  # as dense layers at least
    assert waits_us(444_000_000, kv_bytes=222_000_000) == pytest.approx(7.8)
    assert waits_us(444_000_000, kv_bytes=888_000_000) == pytest.approx(12.8)


def test_the_chain_on_eight_gpus_is_met_within_3_percent():
    chain = StepCost(3_730_000_000, 0, 2 * 1.865e9, layers=28)
    assert expect(chain, H200, 8).token_s * 1e6 == pytest.approx(339, rel=0.03)


def test_stream_and_waiting_add_up():
    expected = expect(StepCost(4_000_000_000, 440_000_000, 4e9, 10), H200, 1)
    assert expected.stream_s == pytest.approx(1e-3)
    assert expected.wait_s == pytest.approx(20e-6)
    assert expected.compute_s == pytest.approx(4e9 / 989e12)
    assert expected.token_s == pytest.approx(1.02e-3)
    assert expected.wall is Wall.BANDWIDTH


def test_without_measurements_share_of_bandwidth_and_waiting_are_assumed():
    expected = expect(StepCost(4_440_000_000, 0, 4e9, 10), MI300X, 1)
    assert expected.stream_s == pytest.approx(4.44e9 / (5.3e12 * 0.925))
    assert expected.wait_s == pytest.approx(20e-6)
    assert not is_measured(Kind.DENSE, MI300X, 1)
    assert expect(StepCost(1, 0, 1, 10), RUBIN, 1).compute_s is None


def recorded(gpus):
    """By shape and position: how far the expected speed is off, and what a layer waited, in µs."""
    rows = json.loads((BENCHMARKS / f"results/{gpus}-h200.json").read_text())
    off, waits_us = {}, {}
    for row in (r for r in rows if r.get("bench", "decode") == "decode"):
        model = read_model(BENCHMARKS / "shapes" / f"{row['shape']}.json")
        cost = step_cost(model, SIXTEEN_BIT, row["start_position"] + row["new_tokens"] // 2)
        expected, measured = expect(cost, H200, gpus), row["decode_tokens_per_s"]["median"]
        name = row["shape"], row["start_position"]
        off[name] = 1 / expected.token_s / measured - 1
        waits_us[name] = (1 / measured - expected.stream_s) * 1e6 / cost.layers
    assert len(off) == 10
    return off, waits_us


@pytest.mark.parametrize(("gpus", "within"), [(2, 0.04), (4, 0.07)])
def test_recorded_speeds_of_several_gpus_are_met_but_for_one(gpus, within):
    """What the module's text tells is what was recorded."""
    off, waits_us = recorded(gpus)
    other = max(waits_us, key=waits_us.__getitem__)
    assert other == ("llama-3.2-1b", 2048)
    fewer = f"{1 - 1 / (1 + off.pop(other)):.0%}".replace("%", " %")
    said = {2: f"makes {fewer} fewer tokens on 2", 4: f"fewer tokens on 2 and {fewer} on 4"}
    assert said[gpus] in told()
    assert max(map(abs, off.values())) < within
    dense = sorted(wait for (shape, _), wait in waits_us.items() if shape != "laneformer-2b")
    said = f"{dense[0]:.1f} to {dense[-1]:.1f} µs a layer, {dense[3]:.1f} in the middle"
    assert said in told()
    lanes = [wait for (shape, _), wait in waits_us.items() if shape == "laneformer-2b"]
    assert (
        f"{min(lanes):.1f} to {max(lanes):.1f} {'µs a layer on 2' if gpus == 2 else 'on 4'}"
        in told()
    )


def told():
    """What the module says of its sources, on one line."""
    return " ".join(expectation.__doc__.split())


def test_what_was_measured_and_what_is_taken_to_be_alike():
    dense, lanes, experts, other = (StepCost(10**9, 0, 1e9, 28, kind) for kind in Kind)
    for gpus in (1, 2, 4, 8):
        assert is_measured(Kind.DENSE, H200, gpus)
        assert is_measured(Kind.LANES, H200, gpus) is (gpus in (2, 4))
        assert is_measured(Kind.EXPERTS, H200, gpus) is (gpus < 4)
        assert not is_measured(Kind.OTHER, H200, gpus)
        a_layer = 3.0e-6 if gpus < 4 else 4.6e-6
        assert expect(lanes, H200, gpus).wait_s == pytest.approx(28 * a_layer)
        assert expect(other, H200, gpus) == expect(dense, H200, gpus)
        assert expect(experts, H200, gpus).wait_s > expect(dense, H200, gpus).wait_s


def test_each_wall():
    assert expect(StepCost(10**7, 0, 1e7, 28), H200, 8).wall is Wall.EXCHANGES
    busy = expect(StepCost(10**9, 0, 1e15, 28), H200, 1)
    assert busy.wall is Wall.COMPUTE
    assert busy.token_s == pytest.approx(1e15 / 989e12 + 28 * 2.0e-6)
