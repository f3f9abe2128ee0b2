"""`--weights` and `--head-weights` where a 16-bit checkpoint is loaded, on the CPU."""

import json

import pytest


def tokens(soloist, *words: object) -> list[int]:
    done = soloist(
        "run", *words, "-p", "def f(x):", "-n", 12, "--device", "cpu", "--ignore-eos", "--json"
    )
    assert done.status == 0, done.err
    return json.loads(done.out)["token_ids"]


@pytest.mark.parametrize(
    "weights",
    [("--weights", "int4"), ("--weights", "int8", "--head-weights", "int4"), ("--weights", "fp8")],
    ids=" ".join,
)
def test_rounding_gives_the_tokens_of_the_quantised_folder(soloist, etude, tmp_path, weights):
    made = tmp_path / "made"
    assert soloist("quantize", etude, *weights, "-o", made).status == 0
    rounded = tokens(soloist, etude, *weights)
    assert rounded == tokens(soloist, made)
    assert len(rounded) == 12


def test_a_head_alone(soloist, etude):
    """The tied embedding stays what it was."""
    assert tokens(soloist, etude, "--head-weights", "int8") == tokens(soloist, etude)


def test_what_was_loaded_is_said(soloist, etude):
    done = soloist("run", etude, "-p", "a", "-n", 1, "--device", "cpu", "--weights", "int4")
    assert "fp32 · weights int4 (groups of 128), head fp32" in done.err
    done = soloist("run", etude, "-p", "a", "-n", 1, "--device", "cpu")
    assert "weights" not in done.err


def refusal(soloist, *words: object) -> tuple[str, str]:
    done = soloist("run", *words, "-p", "a", "-n", 1, "--device", "cpu")
    assert done.status == 2
    assert done.out == ""
    message, _, hint = done.err.partition("\n\nhint: ")
    return message, hint


@pytest.mark.parametrize("option", ["--weights", "--head-weights"])
def test_names_that_are_none(soloist, etude, option):
    message, _ = refusal(soloist, etude, option, "int3")
    assert f"{option} is 'int3' (allowed: int4, int8, fp8)" in message


def test_weights_are_quantised_once(soloist, etude, tmp_path):
    layers, all_of_it = tmp_path / "layers", tmp_path / "all"
    soloist("quantize", etude, "--weights", "int4", "-o", layers)
    soloist("quantize", etude, "--weights", "int4", "--head-weights", "int8", "-o", all_of_it)
    message, hint = refusal(soloist, layers, "--weights", "int8")
    assert "--weights is 'int8' (allowed: none, since its layers are quantised" in message
    assert "int4 (pack-quantized" in message
    assert "leave --weights out" in hint
    message, _ = refusal(soloist, all_of_it, "--head-weights", "int8")
    assert "since its head is quantised" in message
    # A head in 16 bits may still be rounded.
    seen = tokens(soloist, layers, "--head-weights", "int8")
    assert seen == tokens(soloist, all_of_it)


@pytest.mark.parametrize("bench", ["decode", "prefill", "accuracy"])
def test_rows_say_how_weights_are_stored(soloist, etude, bench):
    rounds = {"decode": ("--prompt-tokens", 8, "--new-tokens", 4), "prefill": ("--prefix", "cold")}
    given = ("--positions", 8) if bench == "accuracy" else ("--runs", 1)
    words = (bench, etude, *rounds.get(bench, ()), *given, "--device", "cpu", "--json")
    (row,) = json.loads(soloist("bench", *words).out)
    assert row["weights"] == row["precision"]
    options = ("--weights", "int4", "--head-weights", "int8")
    (row,) = json.loads(soloist("bench", *words, *options).out)
    assert row["weights"] == "int4+int8 head"


@pytest.mark.parametrize("bench", ["decode", "prefill"])
def test_shapes_are_random_codes(soloist, etude, bench):
    sizes = ("--prompt-tokens", 8, *(("--new-tokens", 4) if bench == "decode" else ()))
    words = ("--shape", etude / "config.json", *sizes, "--runs", 1, "--device", "cpu", "--json")
    for options, label in (((), "fp32"), (("--weights", "fp8"), "fp8")):
        row = json.loads(soloist("bench", bench, *words, *options).out)[0]
        assert row["weights"] == label
    assert row["precision"] == "fp32"


def test_rivals_do_not_round(soloist, etude):
    done = soloist("bench", "decode", etude, "--weights", "int4", "--against", "transformers")
    assert done.status == 2
    assert "only without --weights" in done.err
