"""A stuck block's report in words."""

import re
from pathlib import Path

import pytest

import soloist
from soloist.errors import KernelStuck
from soloist.megakernel.fault import PHASES, Fault, RanksFault

CUDA = Path(soloist.__file__).parent / "cuda"


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


def test_phases_and_fields_are_those_of_the_kernel() -> None:
    text = (CUDA / "sync/wait.cuh").read_text()
    names = re.search(r"enum class Phase : u32 \{(.*?)\}", text)
    assert names is not None
    kernel = [n.strip().removeprefix("k").lower() for n in names[1].split(",")]
    assert kernel == [(p.label or p.name).replace("_", "") for p in PHASES]
    host = Fault.__slots__
    structs = dict(re.findall(r"struct (\w+) \{(.*?)\n\};", text, re.DOTALL))

    def fields(struct: str) -> list[str]:
        lines = re.sub(r"//.*", "", structs[struct])
        return [
            field
            for kind, names in re.findall(r"(\w+) ([\w, ]+);", lines)
            for field in (fields("Where") if kind == "Where" else names.split(", "))
        ]

    assert fields("Fault")[1:] == [{"at_round": "round"}.get(name, name) for name in host]
