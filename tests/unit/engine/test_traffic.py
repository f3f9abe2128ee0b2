"""Bytes of decoding against hand-worked cases."""

from dataclasses import replace

import pytest
import torch

from soloist.engine.bandwidth import brief_bandwidth
from soloist.engine.events import Timings
from soloist.engine.traffic import Burst, Traffic
from soloist.model.config import Attention, Layer, Mlp, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import plain
from soloist.model.rope import Rope

WIDE = Layer(Attention(4, 2, 8), Mlp(32))  # 2 · 2 · 8 = 32 numbers a position
NARROW = Layer(Attention(4, 1, 8, window=10), Mlp(32))  # 16 numbers of at most 10 positions
CONFIG = ModelConfig("x", 32, 100, 4096, 1e-6, (WIDE, NARROW), Rope(1e4), tied_head=True)
TRAFFIC = Traffic(1000, CONFIG, plain(Dtype.BF16), shares_steps=True)


def num_bytes(traffic: Traffic, positions: list[int], rounds: int) -> int:
    burst = Burst(traffic, positions)
    for _ in range(rounds):
        burst.add_round([1] * len(positions))
    return burst.num_bytes


def test_one_sequence_reads_weights_keys_and_values_in_every_round() -> None:
    assert num_bytes(TRAFFIC, [5], 1) == 1000 + 2 * (32 + 16) * 5
    # Rounds that see 20, 21 and 22 positions, of which the narrow layer sees 10.
    assert num_bytes(TRAFFIC, [20], 3) == 3 * (1000 + 2 * 16 * 10) + 2 * 32 * (20 + 21 + 22)
    assert num_bytes(TRAFFIC, [20], 2) == 2 * (1000 + 2 * 16 * 10) + 2 * 32 * (20 + 21)
    assert num_bytes(TRAFFIC, [20], 0) == 0


def test_weights_count_once_a_step_if_sequences_share_it() -> None:
    kv = 2 * (32 + 16) * (5 + 7)
    assert num_bytes(TRAFFIC, [5, 7], 1) == 1000 + kv
    assert num_bytes(replace(TRAFFIC, shares_steps=False), [5, 7], 1) == 2 * 1000 + kv


def test_who_has_no_step_in_a_round_reads_nothing_there() -> None:
    burst = Burst(replace(TRAFFIC, shares_steps=False), [5, 7])
    for columns in ([1, 3], [1, 0], [1, 0]):
        burst.add_round(columns)
    # The other one's only step saw the positions of its first column and of its last.
    narrow = 7 + 9
    assert burst.num_bytes == 4 * 1000 + 2 * 48 * (5 + 6 + 7) + 48 * narrow


def test_nothing_is_counted_where_the_model_is_not_known() -> None:
    assert num_bytes(None, [5], 3) == 0


def test_mbu_is_bytes_a_second_over_bandwidth() -> None:
    t = Timings(10, 21, ttft_s=0.1, decode_s=0.5, total_s=0.7, decode_bytes=10**9)
    assert t.mbu(4.0) == pytest.approx(0.5)
    assert t.mbu(None) is None
    assert replace(t, decode_bytes=0).mbu(4.0) is None
    assert replace(t, new_tokens=1, decode_s=0.0).mbu(4.0) is None


def test_a_brief_reading_of_the_host_is_its_best() -> None:
    found = brief_bandwidth(torch.device("cpu"), 0)
    assert found is not None
    assert len(found.rates_gb_per_s) == 1
    assert 0.1 < found.gb_per_s < 2000
    assert "random float32, the best" in found.method
