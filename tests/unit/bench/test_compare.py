"""Which rows are partners, and what counts as slower."""

import pytest

from soloist.bench.compare import compare


def decode(speed: float, spread: float = 1.0, **changed: object) -> dict:
    figures = {"median": speed, "min": speed - spread, "max": speed + spread}
    return {
        "engine": "soloist", "shape": "m", "device": "GPU", "gpus": 1, "precision": "bf16",
        "prompt_tokens": 128, "new_tokens": 256, "columns": 1, "sequences": 1,
        "start_position": 128, "speculation": False, "decode_tokens_per_s": figures,
        "bench": "decode", **changed,
    }  # fmt: skip


def verdict(before: dict, after: dict, threshold: float = 0.05) -> str:
    (difference,) = compare([before], [after], threshold).differences
    return difference.verdict


@pytest.mark.parametrize(
    ("after", "spread", "expected"),
    [
        (100, 1, "same"),
        (96, 1, "same"),
        (94, 1, "slower"),
        (106, 1, "faster"),
        (90, 20, "within spread"),
        (110, 20, "within spread"),
    ],
)
def test_verdicts(after: float, spread: float, expected: str) -> None:
    assert verdict(decode(100, spread), decode(after, spread)) == expected


def test_one_bad_run_hides_no_regression() -> None:
    before = decode(100) | {"decode_tokens_per_s": {"median": 100, "min": 20, "max": 101}}
    assert verdict(before, decode(50)) == "slower"


def test_less_time_is_better() -> None:
    a = {"bench": "startup", "shape": "m", "total_s": {"median": 4.0, "min": 3.9, "max": 4.1}}
    b = a | {"total_s": {"median": 5.0, "min": 4.9, "max": 5.1}}
    assert verdict(a, b) == "slower"
    assert verdict(b, a) == "faster"


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": "n"}, {"device": "CPU"}, {"gpus": 2}, {"precision": "fp16"}, {"columns": 8},
        {"prompt_tokens": 64}, {"new_tokens": 64}, {"sequences": 2}, {"start_position": 8192},
        {"bench": "startup"},
    ],
)  # fmt: skip
def test_rows_under_other_conditions_are_no_partners(changed: dict) -> None:
    made = compare([decode(100)], [decode(50, **changed)], 0.05)
    assert (len(made.differences), len(made.only_before), len(made.only_after)) == (0, 1, 1)
    assert made.only_before == ("decode: soloist m 128 + 256 bf16",)
    for field, value in changed.items():
        # A start at the prompt's end moves with it; rows of another kind are not held against it.
        told = "" if field == "bench" else f"{field} {decode(0)[field]} and {value}"
        assert made.apart == (told and f"decode: soloist m 128 + 256 bf16: {told}")


def test_fields_that_older_files_lack() -> None:
    old = decode(100)
    for field in ("bench", "sequences", "start_position"):
        del old[field]
    assert verdict(old, decode(100)) == "same"


def test_rivals_with_other_kept_tokens_are_no_partners() -> None:
    first = {"median": 9, "min": 9, "max": 9}
    old = {"bench": "rival", "engine": "r", "shape": "m", "prompt_tokens": 9, "ttft_ms": first}
    assert verdict(old, old | {"kept_tokens": 0, "decode_tokens_per_s": None}) == "same"
    apart = compare([old], [old | {"kept_tokens": 8}], 0.05)
    assert apart.apart.endswith("kept_tokens 0 and 8")
    assert apart.only_after == ("rival: r m 9 + None with 8 kept",)


def test_partners_have_the_same_engine_where_there_is_one() -> None:
    before = [decode(100), decode(50, engine="rival")]
    made = compare(before, [decode(50, engine="rival"), decode(100)], 0.05)
    assert [d.verdict for d in made.differences] == ["same", "same"]
    (other,) = compare([decode(100)], [decode(50, engine="rival")], 0.05).differences
    assert (other.verdict, other.row.endswith("→ rival")) == ("slower", True)
    unclear = compare(before, [decode(50, engine="third")], 0.05)
    assert not unclear.differences
    assert unclear.apart.endswith("engine soloist and third, and there are more alike")


def test_a_speed_that_is_no_longer_stated_is_a_regression() -> None:
    serve = {"bench": "serve", "shape": "m", "api": "chat", "prefix": "warm", "max_tokens": 9}
    with_speed = serve | {"decode_tokens_per_s": {"median": 9, "min": 9, "max": 9}}
    without = serve | {"decode_tokens_per_s": None}
    assert [d.verdict for d in compare([with_speed], [without], 0.05).regressions] == ["lost"]
    assert verdict(without, with_speed) == "new"
    assert compare([without], [without], 0.05).differences == ()


def test_servers_may_call_a_model_by_its_folder() -> None:
    speed = {"decode_tokens_per_s": {"median": 9, "min": 9, "max": 9}}
    row = {"bench": "serve", "api": "chat", "prefix": "warm", "max_tokens": 9, **speed}
    assert verdict(row | {"shape": "m"}, row | {"shape": "/models/m"}) == "same"
    assert not compare([row | {"shape": "m"}], [row | {"shape": "n"}], 0.05).differences


@pytest.mark.parametrize("kind", ["decode", "prefill", "startup"])
def test_weights_are_a_condition_that_older_files_lack(kind: str) -> None:
    figures = {
        name: {"median": 9, "min": 9, "max": 9}
        for name in ("decode_tokens_per_s", "ttft_ms", "total_s")
    }
    old = {"bench": kind, "engine": "soloist", "shape": "m", "precision": "bf16", **figures}
    plain, int4 = old | {"weights": "bf16"}, old | {"weights": "int4"}
    assert compare([old], [plain], 0.05).differences
    found = compare([old], [int4], 0.05)
    assert not found.differences
    assert "int4 in bf16" in found.only_after[0]
    assert "weights" in found.apart
    assert compare([int4], [dict(int4)], 0.05).differences


def test_accuracy_is_not_compared() -> None:
    row = {"bench": "accuracy", "engine": "soloist", "shape": "m"}
    made = compare([row], [row], 0.05)
    assert (made.differences, len(made.only_before), len(made.only_after)) == ((), 1, 1)
