"""A stuck block's report in words."""

import re
from pathlib import Path

import pytest

import soloist
from soloist.errors import KernelStuck
from soloist.megakernel.fault import PHASES, Fault

CUDA = Path(soloist.__file__).parent / "cuda"


def fault(*, copies: int, landed: int, released: int) -> Fault:
    words = [1, 7, 93, 5, 11, 2, 5, 12, copies, landed, released, 0, 0]
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
        "round 5, layer 12", "40 copies", "37 landed", "30 were read",
    ):  # fmt: skip
        assert fact in message


@pytest.mark.parametrize(
    ("landed", "released", "verdict"),
    [(37, 30, "other blocks are behind"), (30, 30, "memory is behind"), (40, 40, "own producer")],
)
def test_which_side_is_behind(landed: int, released: int, verdict: str) -> None:
    assert verdict in fault(copies=40, landed=landed, released=released).seen


def test_phases_and_fields_are_those_of_the_kernel() -> None:
    text = (CUDA / "sync/wait.cuh").read_text()
    names = re.search(r"enum class Phase : u32 \{(.*?)\}", text)
    assert names is not None
    kernel = [n.strip().removeprefix("k").lower() for n in names[1].split(",")]
    short = {"attention_output": "output"}
    assert kernel == [short.get(p, p).replace("_", "") for p in PHASES]
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
