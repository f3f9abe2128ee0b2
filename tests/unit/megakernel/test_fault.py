"""A stuck block's report in words."""

import numpy as np
import pytest

from soloist.errors import KernelStuck
from soloist.megakernel.abi import FAULT, WHERE
from soloist.megakernel.fault import Fault, RanksFault


def fault(*, copies: int, landed: int, released: int, phase: int = 2, missing: int = 0) -> Fault:
    words = [1, 7, 93, 5, 11, phase, 5, 12, copies, landed, released, missing, 0]
    found = Fault.of_words(words)
    assert found is not None
    return found


def test_no_report() -> None:
    assert Fault.of_words([0] * 16) is None


def test_the_message_names_everything() -> None:
    f = fault(copies=40, landed=37, released=30)
    message = KernelStuck(f.where, f.needs, f.seen).message
    for fact in (
        "block 7 on SM 93", "round 5", "layer 11", "phase attention", "q, k and v",
        "round 5, layer 12", "40 copies", "37 have landed", "30 were read",
    ):  # fmt: skip
        assert fact in message


@pytest.mark.parametrize(
    ("landed", "released", "verdict"),
    [(37, 30, "other blocks are behind"), (30, 30, "memory is behind"), (40, 40, "own producer")],
)
def test_which_side_is_behind(landed: int, released: int, verdict: str) -> None:
    assert verdict in fault(copies=40, landed=landed, released=released).seen


def lacking(*ranks: int) -> Fault:
    """Stuck in attention_output for want of these ranks' sums."""
    return fault(copies=9, landed=9, released=3, phase=3, missing=sum(1 << r for r in ranks))


def test_of_several_ranks_the_one_that_waits_for_no_other_is_named() -> None:
    own = fault(copies=9, landed=4, released=4, phase=1)
    found = RanksFault({0: lacking(2), 1: lacking(2), 2: own, 3: lacking(1, 2)}, [0, 1, 4, 5])
    assert found.where.startswith("rank 2 on GPU 4: block 7")
    assert found.needs.startswith("the residual stream of all blocks")
    for told in (
        "memory is behind", "rank 0 on GPU 0 waited for rank 2 (block 7",
        "rank 3 on GPU 5 waited for ranks 1, 2 (block 7",
    ):  # fmt: skip
        assert told in found.seen


def test_a_rank_that_said_nothing_is_who_was_waited_for() -> None:
    found = RanksFault({0: lacking(1), 1: None}, [3, 3])
    assert found.where.startswith("rank 0 on GPU 3")
    assert found.needs == "partial sums or choices of rank 1"
    assert found.seen.endswith("rank 1 on GPU 3 reported nothing")


def test_a_rank_that_lacks_its_own_sums_waits_for_its_own_blocks() -> None:
    found = RanksFault({0: lacking(0, 1), 1: lacking(0)}, [0, 1])
    assert found.rank == 0
    assert found.needs.startswith("attention of all heads")
    assert "rank 1 on GPU 1 waited for rank 0" in found.seen


def test_every_field_is_the_kernels() -> None:
    words = range(1, FAULT.num_bytes // 4 + 1)
    report = np.array(words, np.uint32).view(FAULT.dtype)[0]
    found = Fault.of_words(words)
    assert found is not None
    assert (found.block, found.sm, found.missing) == (2, 3, report["missing"])
    for name in WHERE.offsets:
        assert getattr(found, name) == report["where"][name]


def test_the_report_fits_the_words_that_the_host_keeps() -> None:
    assert FAULT.num_bytes <= 16 * 4
