"""`soloist bench` as it is typed: models, shapes, servers, and what is done with result files."""

import json

import pytest

from soloist.model.folder import shipped_folder
from unit.bench.toy_server import Toy, serving

SHAPE = shipped_folder("etude-draft") / "config.json"
SUBJECTS = pytest.mark.parametrize(
    "subject", [("etude-draft",), ("--shape", SHAPE)], ids=["model", "shape"]
)


@SUBJECTS
def test_accuracy(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    done = soloist(
        "bench", "accuracy", *subject, "--positions", 40, "--device", "cpu", "--precision", "bf16",
        "--against", "transformers", "-o", file,
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "40 teacher-forced positions" in done.out
    rows = json.loads(file.read_text())
    assert [row["engine"] for row in rows] == ["soloist, reference", "transformers forward"]
    for row in rows:
        assert row["bench"] == "accuracy"
        assert 1e-6 < row["mean_kl"] <= row["max_kl"] < 0.1, "bf16 is near fp32, and not it"
        assert abs(row["nll_difference"]) < 10 * row["nll_standard_error"] + 0.01
        assert row["top_1_agreement"] > 0.8
        assert {"device", "commit", "command", "date"} <= row.keys()


def test_accuracy_of_a_given_text(soloist, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x\n" * 20)
    options = ("bench", "accuracy", "etude-draft", "--text", text, "--device", "cpu")
    done = soloist(*options, "--positions", 30, "--json")
    assert json.loads(done.out)[0]["text"] == "text.py"
    refused = soloist(*options, "--positions", 4000)
    assert refused.status == 2
    assert "at least 4,001 tokens" in refused.err


@SUBJECTS
def test_startup(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    done = soloist("bench", "startup", *subject, "--device", "cpu", "--runs", 1, "-o", file)
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert row["bench"] == "startup"
    assert row["kernels_built"] == 0
    assert row["executor"] == "reference"
    parts = sum(row[name]["median"] for name in ("weights_s", "kernels_s", "rest_s"))
    assert row["total_s"]["median"] == pytest.approx(parts, abs=0.03)
    assert 0 < row["weights_s"]["median"] < row["rest_s"]["median"]


@pytest.mark.gpu
@SUBJECTS
def test_startup_with_and_without_compiled_kernels(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    done = soloist("bench", "startup", *subject, "--device", "cuda", "--runs", 1, "-o", file)
    assert done.status == 0, done.err
    warm, cold = json.loads(file.read_text())
    assert (warm["kernel_cache"], cold["kernel_cache"]) == ("warm", "cold")
    assert warm["kernels_built"] == 0 == warm["kernels_s"]["median"]
    assert cold["kernels_built"] >= 2, "the decode kernel and prefill's"
    assert 0 < cold["kernels_s"]["median"] < 25
    assert warm["total_s"]["median"] < cold["total_s"]["median"]


def test_a_start_that_fails_says_why(soloist, tmp_path):
    done = soloist("bench", "startup", tmp_path, "--device", "cpu", "--runs", 1)
    assert done.status == 3
    assert "is empty" in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("accuracy", "etude", "--shape", SHAPE), "MODEL"),
        (("accuracy", "etude", "--precision", "fp32"), "--precision"),
        (("accuracy", "etude", "--positions", 1), "--positions"),
        (("accuracy", "etude", "--positions", 9000), "8,192"),
        (("accuracy", "etude", "--against", "vllm"), "vllm"),
        (("accuracy", "etude", "--repeats", -1), "--repeats"),
        (("accuracy", "etude-draft", "--device", "cpu", "--repeats", 2), "decode kernel only"),
        (("accuracy", "--shape", SHAPE, "--text", "x"), "--text"),
        (("accuracy", "etude-draft", "--device", "cpu", "--text", "nowhere"), "nowhere"),
        (("startup", "etude", "--shape", SHAPE), "MODEL"),
        (("startup", "etude", "--runs", 0), "--runs"),
        (("startup", "--shape", SHAPE, "--precision", "fp32", "--device", "cpu"), "--precision"),
    ],
)
def test_what_cannot_be_measured(soloist, options, named):
    done = soloist("bench", *options)
    assert done.status == 2
    assert done.out == ""
    assert named in done.err
    assert "hint: " in done.err


def test_bandwidth_and_baselines(soloist, tmp_path):
    file = tmp_path / "rows.json"
    done = soloist("bench", "bandwidth", "--device", "cpu", "-o", file)
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert row["bench"] == "bandwidth"
    assert 0.5 < row["gb_per_s"]["min"] <= row["gb_per_s"]["median"] <= row["gb_per_s"]["max"]
    assert f"{row['gb_per_s']['median']:,.1f} GB/s" in done.out

    better = tmp_path / "better.json"
    row["gb_per_s"] = {name: 100 * value for name, value in row["gb_per_s"].items()}
    better.write_text(json.dumps([row]))
    slower = soloist("bench", "compare", better, file)
    assert (slower.status, "1 of 1 figures slower" in slower.out) == (4, True)
    faster = soloist("bench", "compare", file, better, "--json")
    assert (faster.status, json.loads(faster.out)["regressions"]) == (0, 0)
    now = soloist("bench", "bandwidth", "--device", "cpu", "--baseline", better, "-o", better)
    assert (now.status, "slower" in now.err) == (4, True), "read before it is replaced"

    better.write_text("[]")
    assert soloist("bench", "compare", better, file).status == 2
    missing = soloist("bench", "bandwidth", "--baseline", tmp_path / "none.json")
    assert (missing.status, "cannot be read" in missing.err) == (2, True)


def test_a_server_and_a_report(soloist, tmp_path):
    file, page = tmp_path / "rows.json", tmp_path / "report.html"
    with serving(Toy(4, tokens_per_s=2000)) as toy:
        asked = ("bench", "serve", toy.url, "--prompt", "x", "-n", 40, "--runs", 1)
        done = soloist(*asked, "--api-key", "sk-secret", "--name", "toy", "-o", file)
        assert done.status == 0, done.err
        again = soloist(*asked, "--baseline", file, "--threshold", 0.9, "--json")
    rows = json.loads(file.read_text())
    assert [(row["prefix"], row["engine"]) for row in rows] == [("cold", "toy"), ("warm", "toy")]
    assert "sk-secret" not in file.read_text()
    assert toy.asked[0]["key"] == "Bearer sk-secret"
    assert "usage in every chunk" in done.out
    assert (again.status, json.loads(again.out)[0]["new_tokens"]) == (0, 40)
    assert soloist("bench", "report", file, "-o", page).status == 0
    assert "serve: TTFT ms" in page.read_text()
    unreachable = soloist("bench", "serve", toy.url)
    assert (unreachable.status, "hint: " in unreachable.err) == (3, True)
    assert soloist("bench", "serve", toy.url, "--prefix", "hot").status == 2
