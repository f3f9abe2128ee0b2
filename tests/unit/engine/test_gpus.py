"""Which GPUs run a model together, what each holds, and what cannot be."""

import pytest
import torch

from plan.shapes import SHAPES
from soloist.engine.config import EngineConfig
from soloist.engine.gpus import Placement, choose_gpus, place
from soloist.engine.memory import Footprint
from soloist.engine.support import support_on
from soloist.errors import (
    DeviceMissing,
    GpusMissing,
    NoPeerAccess,
    RanksUnsupported,
    SettingError,
)
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.families.dense import decoder_tensors
from unit.prefill.models import model

CPU = torch.device("cpu")
H200 = ((9, 0), 132, 227 * 1024)
DENSE = model(*[Attention(8, 4, 64)] * 2, hidden_size=256, ffn=512, vocab_size=1000)


def everybody(_a: int, _b: int) -> bool:
    return True


def pairs(a: int, b: int) -> bool:
    return a // 2 == b // 2


def fine(_ranks: int) -> str:
    return ""


def at_most_four(ranks: int) -> str:
    return "too narrow" if ranks > 4 else ""


@pytest.mark.parametrize(
    ("asked", "alike", "reaches", "refusal", "chosen"),
    [
        (2, range(8), everybody, fine, [0, 1]),
        (8, range(8), everybody, fine, list(range(8))),
        ("auto", range(8), everybody, fine, list(range(8))),
        ("auto", range(7), everybody, fine, [0, 1, 2, 3]),
        ("auto", range(8), everybody, at_most_four, [0, 1, 2, 3]),
        ("auto", range(8), pairs, fine, [0, 1]),
        ("auto", [3], everybody, fine, [3]),
        ("auto", range(8), everybody, lambda _: "no", [0]),
        (2, [1, 2, 3], pairs, fine, [2, 3]),
    ],
)
def test_chosen_gpus(asked, alike, reaches, refusal, chosen) -> None:
    assert choose_gpus(asked, list(alike), reaches, refusal) == chosen


@pytest.mark.parametrize(
    ("asked", "count", "reaches", "refusal", "error", "message"),
    [
        (3, 8, everybody, fine, SettingError, "1, 2, 4, 8, auto"),
        (4, 2, everybody, fine, GpusMissing, "4 GPUs were requested.*has 2 of the same model"),
        (4, 8, pairs, fine, NoPeerAccess, r"largest group that does: \[0, 1\]"),
        (8, 8, everybody, at_most_four, RanksUnsupported, "8 GPUs: too narrow.*1, 2, 4"),
    ],
)
def test_refused_counts_come_with_those_that_work(
    asked, count, reaches, refusal, error, message
) -> None:
    with pytest.raises(error, match=message):
        choose_gpus(asked, list(range(count)), reaches, refusal)


def placed(**asked: object) -> Placement:
    return place(EngineConfig(**asked), CPU, DENSE, Dtype.BF16)  # type: ignore[arg-type]


def test_without_a_gpu_there_is_one_place() -> None:
    assert placed().devices == placed(gpus="auto").devices == (CPU,)
    with pytest.raises(SettingError, match=r"--gpus is 2.*without a GPU"):
        placed(gpus=2)
    with pytest.raises(SettingError, match=r"--gpus is 4.*with --device cuda:1"):
        placed(gpus=4, device="cuda:1")


def test_ranks_are_placed_as_told_or_refused() -> None:
    with pytest.raises(SettingError, match="rank_devices"):
        placed(rank_devices=(0, 0, 0))
    with pytest.raises(DeviceMissing, match="cuda:99"):
        placed(rank_devices=(99, 99))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_gpu_holds_its_share_and_the_table(ranks: int) -> None:
    config = read_config(SHAPES["llama-3.1-8b"])
    one, several = (
        Footprint(
            held, decoder_tensors(held), Dtype.BF16,
            support_on(*H200, config, Dtype.BF16, placed.ranks).plan,
        ).estimate(4096)
        for placed in (Placement((CPU,)), Placement((CPU,) * ranks))
        for held in [placed.share_of(config)]
    )  # fmt: skip
    table = 2 * config.vocab_size * config.hidden_size
    assert several.kv_bytes == one.kv_bytes // ranks
    rest = (one.weights_bytes - table) / ranks
    assert rest <= several.weights_bytes - table < 1.25 * rest, "padding"


def test_sharing_ranks_have_a_part_of_the_sms() -> None:
    halves = support_on((9, 0), 132 // 2, 227 * 1024, DENSE, Dtype.BF16, 2)
    assert halves.plan is not None
    assert halves.plan.blocks <= 66
    assert Placement((CPU, CPU)).sharing == 2
