"""Whether a model fits, by how much it does not, and what would."""

from dataclasses import replace
from pathlib import Path

import pytest

from soloist.device import HEADROOM_BYTES
from soloist.errors import DoesNotFit, SettingError, ShapeUnsupported
from soloist.megakernel import plan as plan_module
from soloist.model.dtype import Dtype
from soloist.model.kv_format import kv_format
from soloist.planning.expectation import Wall
from soloist.planning.hardware import find_hardware
from soloist.planning.precision import PRECISIONS, find_precision
from soloist.planning.reach import (
    GPU_COUNTS,
    Subject,
    find_shape_obstacle,
    longest_context,
    reach,
    reaches,
    what_fits,
)
from soloist.planning.reading import read_model
from unit.model.configurations import LANEFORMER_2B, LLAMA_31_8B, written

FP16, FP8, INT4 = (find_precision(name) for name in ("fp16", "fp8", "int4"))
WEIGHTS, KV_A_TOKEN = 16_060_522_496, 131_072  # Llama 3.1 8B in 16 bits


def subject_of(folder: Path, hardware: str, context: int, **changes: object) -> Subject:
    model = read_model(written(folder, {**LLAMA_31_8B, **changes}))
    return Subject(model, find_hardware(hardware), context)


def test_a_model_that_fits(tmp_path):
    row = reach(subject_of(tmp_path, "RTX 4090", 8192), FP16, 1)
    assert row.weights_bytes == WEIGHTS
    assert row.kv_bytes == 8192 * KV_A_TOKEN
    assert row.fits
    assert row.limit_tokens_per_s == pytest.approx(1.008e12 / row.bytes_per_token)
    assert row.wall is Wall.BANDWIDTH
    assert not row.measured


@pytest.mark.parametrize(("kv", "head_bytes"), [("int8", 130), ("int4", 72)])
def test_keys_and_values_in_fewer_bits(tmp_path, kv, head_bytes):
    """Less is held and read, as was measured on one GPU; and GPUs run it."""
    plain = subject_of(tmp_path, "H200", 131_072)
    model = plain.model
    subject = replace(plain, model=replace(model, kv=kv_format(kv, model.config, Dtype.BF16)))
    row, wide = reach(subject, FP16, 1), reach(plain, FP16, 1)
    assert row.kv_bytes == 131_072 * 2 * 32 * 8 * head_bytes
    assert wide.bytes_per_token - row.bytes_per_token == wide.kv_bytes - row.kv_bytes
    assert wide.measured
    assert row.measured
    assert not reach(subject, FP16, 2).measured
    assert [found.obstacle for found in reaches(subject, [FP16], GPU_COUNTS)] == [""] * 4


def test_keys_and_values_in_fewer_bits_that_the_kernel_lacks(tmp_path, monkeypatch):
    """Codes are named only where nothing else is the reason."""

    def with_codes(**changes: object) -> Subject:
        plain = subject_of(tmp_path, "H200", 1024, **changes)
        kv = kv_format("int8", plain.model.config, Dtype.BF16)
        return replace(plain, model=replace(plain.model, kv=kv))

    heads_of_256 = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    (row,) = reaches(with_codes(**heads_of_256), [FP16], [1])
    assert row.obstacle == "reference only"

    def refuse(*_: object) -> None:
        raise ShapeUnsupported("such codes", "16 bits")

    monkeypatch.setattr(plan_module, "require_kv", refuse)
    (row,) = reaches(with_codes(), [FP16], [1])
    assert row.obstacle == "no int8 KV cache"
    assert not reaches(subject_of(tmp_path, "H200", 1024), [FP16], [1])[0].obstacle


def test_a_model_that_does_not_fit_lacks_so_much(tmp_path):
    subject = subject_of(tmp_path, "RTX 4090", 131_072)
    row = reach(subject, FP16, 1)
    needed = WEIGHTS + 131_072 * KV_A_TOKEN + HEADROOM_BYTES
    assert row.missing_bytes == needed - 24 * 10**9
    assert row.wall is Wall.CAPACITY
    assert reach(subject, FP16, 2).fits  # each holds half of weights and cache
    fits = what_fits(subject)
    assert "fp16/bf16 on 2 GPUs, fp8 on 2 GPUs, int4 on 1 GPU" in fits


def test_longest_context_is_exact(tmp_path):
    subject = subject_of(tmp_path, "RTX 4090", 131_072)
    longest = longest_context(subject, FP16, 1)
    assert longest == (24 * 10**9 - HEADROOM_BYTES - WEIGHTS) // KV_A_TOKEN
    assert reach(subject_of(tmp_path, "RTX 4090", longest), FP16, 1).fits
    assert not reach(subject_of(tmp_path, "RTX 4090", longest + 1), FP16, 1).fits
    assert longest_context(subject, FP16, 8) == 131_072  # no more than the model's own


def test_refusal_says_what_would_fit(tmp_path):
    subject = subject_of(tmp_path, "RTX 4090", 131_072)
    with pytest.raises(DoesNotFit) as refusal:
        reaches(subject, [FP16], [1])
    assert "needs 33.5 GB on one GPU, 9.54 GB more than a GPU's 24 GB" in refusal.value.message
    assert "fp16/bf16 on 2 GPUs" in refusal.value.hint
    assert f"--context {longest_context(subject, FP16, 1)}" in refusal.value.hint


def test_refusal_where_only_less_context_fits(tmp_path):
    subject = subject_of(tmp_path, "RTX 3090", 131_072, num_hidden_layers=300)
    with pytest.raises(DoesNotFit) as refusal:
        reaches(subject, PRECISIONS, GPU_COUNTS)
    longest = longest_context(subject, INT4, 8)
    assert f"int4 on 8 GPUs with a context of {longest:,} tokens" in refusal.value.hint
    with_less = Subject(subject.model, subject.hardware, longest)
    assert any(row.fits for row in reaches(with_less, PRECISIONS, GPU_COUNTS))


def test_refusal_where_nothing_fits(tmp_path):
    subject = subject_of(tmp_path, "RTX 3090", 1, num_hidden_layers=2000)
    with pytest.raises(DoesNotFit) as refusal:
        reaches(subject, PRECISIONS, GPU_COUNTS)
    assert "8 GPUs hold up to 190 GB of weights" in refusal.value.hint


def test_what_runs_and_what_does_not_yet(tmp_path):
    rows = reaches(subject_of(tmp_path, "H200", 8192), PRECISIONS, GPU_COUNTS)
    assert len(rows) == 16
    running = [(r.precision, r.gpus) for r in rows if not r.obstacle]
    assert running == [(one, gpus) for one in (FP16, FP8, INT4) for gpus in GPU_COUNTS]
    assert [r.gpus for r in rows if r.measured] == [1, 2, 4, 8]  # in 16 bits only
    amd = reaches(subject_of(tmp_path, "MI300X", 8192), [FP16], [1])
    assert amd[0].obstacle == "no kernel for MI300X"


def test_a_model_that_the_kernel_cannot_run(tmp_path):
    model = read_model(written(tmp_path, {**LANEFORMER_2B, "lm_head_type": "lane"}))
    subject = Subject(model, find_hardware("H200"), 1024)
    (row,) = reaches(subject, [FP16], [1])
    assert row.obstacle == "reference only"
    assert "the decode kernel does not support" in find_shape_obstacle(subject)
    assert not row.measured


def test_a_precision_in_which_rows_do_not_divide(tmp_path):
    subject = subject_of(tmp_path, "H200", 1024, intermediate_size=14_352)
    with pytest.raises(SettingError, match="fp16/bf16, fp8 "):
        reaches(subject, [INT4], [1])
