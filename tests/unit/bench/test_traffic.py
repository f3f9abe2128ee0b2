"""What a token makes a server read, by the configuration of its model."""

import json
from pathlib import Path

import pytest

from soloist.bench.traffic import Traffic, read_traffic
from soloist.errors import SettingError, UserError
from unit.planning.mixtures import GPT_OSS_120B, QWEN3_30B_A3B


def traffic_of(folder: Path, values: dict, precision: str, gpus: int = 1) -> Traffic:
    config, machine = folder / "config.json", folder / "bandwidth.json"
    config.write_text(json.dumps(values))
    machine.write_text(json.dumps([{"bench": "bandwidth", "gb_per_s": {"median": 4000.0}}]))
    return read_traffic(config, precision, machine, gpus)


def test_a_mixture_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    h, layers = 2048, 48
    of_layer = h * 40 * 128 + h * 32 * 128 + 128 * h + 2 * h + 2 * 128 + 8 * 3 * h * 768
    weights = 2 * (layers * of_layer + 151936 * h + h)
    kv = 1000 * 2 * 4 * 128 * 2 * layers
    made = traffic_of(tmp_path, QWEN3_30B_A3B, "bf16", gpus=2)
    assert made.bytes_at(1000) == weights + kv
    assert made.bandwidth == 8e12
    assert traffic_of(tmp_path, QWEN3_30B_A3B, "fp32").bytes_at(1000) == 2 * (weights + kv)


def test_layers_that_slide_are_read_as_far_as_they_see(tmp_path: Path) -> None:
    made = traffic_of(tmp_path, GPT_OSS_120B, "fp4")
    assert made.bytes_at(10_000) - made.bytes_at(1000) == 18 * 2 * 8 * 64 * 2 * 9000


def test_what_is_no_precision_or_bandwidth(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--precision"):
        traffic_of(tmp_path, QWEN3_30B_A3B, "int3")
    traffic_of(tmp_path, QWEN3_30B_A3B, "bf16")
    (tmp_path / "bandwidth.json").write_text("[]")
    with pytest.raises(UserError, match="0 rows of bandwidth"):
        read_traffic(tmp_path / "config.json", "bf16", tmp_path / "bandwidth.json")
