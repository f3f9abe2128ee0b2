"""`soloist bench` as it is typed: models, shapes, servers, and what is done with result files."""

import json

import pytest
import torch

from soloist.engine import Engine, EngineConfig
from soloist.model.folder import shipped_folder
from soloist.sampling import SamplingParams
from timing import judged
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


def test_accuracy_with_a_kv_cache_in_fewer_bits(soloist, tmp_path):
    """In fp32 nothing else differs, and fewer bits cost more."""
    found = {}
    for kv in ("int8", "fp8", "int4"):
        file = tmp_path / f"{kv}.json"
        done = soloist(
            "bench", "accuracy", "etude", "--positions", 700, "--device", "cpu",
            "--precision", "fp32", "--kv", kv, "-o", file,
        )  # fmt: skip
        assert done.status == 0, done.err
        assert f"KV cache {kv}" in done.out
        (found[kv],) = json.loads(file.read_text())
        assert (found[kv]["kv"], found[kv]["precision"]) == (kv, "fp32")
    assert 1e-6 < found["int8"]["mean_kl"] < found["fp8"]["mean_kl"] / 5
    assert found["fp8"]["mean_kl"] < found["int4"]["mean_kl"] / 3 < 0.1
    first, second = found["int4"]["by_position"]
    assert (first["first"], first["stop"], second["stop"]) == (0, 512, 700)
    for figure in ("mean_kl", "nll", "nll_difference"):
        mean = (512 * first[figure] + 188 * second[figure]) / 700
        assert mean == pytest.approx(found["int4"][figure], rel=1e-6)


def test_models_are_measured_in_turns(soloist, tmp_path):
    file = tmp_path / "rows.json"
    sizes = ("--prompt-tokens", 9, "--new-tokens", 5, "--runs", 2, "--device", "cpu")
    asked = ("bench", "decode", "etude-draft", "--beside", "etude", "--beside", "etude-draft")
    done = soloist(*asked, *sizes, "-o", file)
    assert done.status == 0, done.err
    rows = json.loads(file.read_text())
    assert [row["shape"] for row in rows] == ["etude-draft", "etude", "etude-draft"]
    assert {row["runs"] for row in rows} == {2}
    assert rows[0]["output_ids_sha256"] == rows[2]["output_ids_sha256"]
    assert rows[0]["streamed_bytes_per_token"] < rows[1]["streamed_bytes_per_token"]
    refused = soloist("bench", "decode", "--shape", SHAPE, "--beside", "etude")
    assert refused.status == 2
    assert "--beside" in refused.err
    assert "only without --shape" in refused.err


@pytest.mark.few(2)
@pytest.mark.parametrize("bench", ["decode", "prefill"])
@pytest.mark.parametrize("subject", [("etude-draft",), ("--shape", SHAPE)], ids=["model", "shape"])
def test_speed_with_a_kv_cache_in_fewer_bits(soloist, tmp_path, bench, subject):
    """The row names it, and is no pair of one without."""
    file, plain = tmp_path / "int4.json", tmp_path / "none.json"
    asked = ("bench", bench, *subject, "--device", "cpu", "--runs", 1, "--prompt-tokens", 200)
    asked += ("--new-tokens", 8) if bench == "decode" else ()
    done = soloist(*asked, "--kv", "int4", "-o", file)
    assert done.status == 0, done.err
    assert "KV cache int4" in done.out
    assert soloist(*asked, "-o", plain).status == 0
    coded, exact = (json.loads(one.read_text())[0] for one in (file, plain))
    assert (coded["kv"], exact["kv"]) == ("int4", "")
    if bench == "decode":
        assert coded["streamed_bytes_per_token"] < exact["streamed_bytes_per_token"]
    compared = soloist("bench", "compare", plain, file)
    assert "with a KV cache in int4" in compared.out


@pytest.mark.parametrize("head", [(), ("--head-weights", "int8")], ids=["tied", "head"])
def test_accuracy_on_rounded_weights(soloist, head):
    """transformers reads the numbers of the same codes; against others, rounding shows."""
    options = ("--positions", 60, "--device", "cpu", "--weights", "int4", *head, "--json")
    label = "int4+int8 head" if head else "int4"
    ways = {}
    for against in ("transformers", "unquantised"):
        done = soloist("bench", "accuracy", "etude-draft", *options, "--against", against)
        assert done.status == 0, done.err
        ways[against] = json.loads(done.out)
    same, rival = ways["transformers"]
    assert (same["weights"], rival["weights"]) == (label, label)
    assert rival["engine"] == "transformers forward"
    for row in (same, rival):
        assert row["fp32_weights"] == "the same"
        assert row["mean_kl"] < 0.01, "of the same numbers"
    again, other = ways["unquantised"]
    assert (again["mean_kl"], again["fp32_weights"]) == (same["mean_kl"], "the same")
    assert (other["engine"], other["fp32_weights"]) == (again["engine"], "unquantised")
    assert other["nll"] == again["nll"], "the same logits"
    assert other["mean_kl"] > 10 * again["mean_kl"], "4 bits cost more than bf16 arithmetic"
    assert other["nll_difference"] > again["nll_difference"]


@SUBJECTS
def test_decode_on_the_cpu(soloist, tmp_path, subject):
    """A smoke run of what the recorded files hold: every figure is there and adds up."""
    file = tmp_path / "rows.json"
    done = soloist(
        "bench", "decode", *subject, "--device", "cpu", "--prompt-tokens", 40, "--new-tokens", 12,
        "--runs", 2, "-o", file,
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert (row["bench"], row["engine"], row["gpus"], row["precision"]) == (
        "decode", "soloist", 0, "fp32",
    )  # fmt: skip
    assert (row["prompt_tokens"], row["new_tokens"], row["runs"]) == (40, 12, 2)
    speed, times = row["decode_tokens_per_s"], row["token_ms"]
    assert speed["min"] <= speed["median"] <= speed["max"]
    assert times["min"] <= times["p10"] <= times["p50"] <= times["p99"] <= times["max"]
    # Mean times between tokens are the decode speed's inverse, so neither is far from the other.
    assert times["min"] <= 1e3 / speed["median"] <= times["max"]
    moved = row["streamed_bytes_per_token"] * speed["median"]
    assert row["mbu"] == pytest.approx(moved / row["bandwidth_gb_per_s"] / 1e9, abs=0.002)
    assert row["clocks"] is None
    assert "a token every" in done.out


def test_decode_with_drafts_has_a_row_for_each_kind(soloist, tmp_path):
    file = tmp_path / "rows.json"
    done = soloist(
        "bench", "decode", "etude-draft", "--device", "cpu", "--prompt-tokens", 40,
        "--new-tokens", 60, "--runs", 1, "--prediction", "--wrong", 0.1, "--speculate", "auto",
        "-o", file,
    )  # fmt: skip
    assert done.status == 0, done.err
    rows = json.loads(file.read_text())
    assert [(row["speculation"], row["drafting"], row["wrong"]) for row in rows] == [
        (False, "", None), (True, "prediction", 0.1), (True, "lookup", None),
    ]  # fmt: skip
    assert len({row["output_ids_sha256"] for row in rows}) == 1, "drafts change no token"
    assert {row["temperature"] for row in rows} == {1.0}
    plain, predicted, looked_up = (row["tokens_per_round"] for row in rows)
    assert plain is None
    assert predicted > 2
    assert looked_up >= 1
    assert "prediction, 10% wrong" in done.out
    assert rows[0]["accepted"] is None
    assert all(0 < row["accepted"] <= 1 for row in rows[1:])


def test_requests_side_by_side_have_a_row_together(soloist):
    options = ("--device", "cpu", "--prompt-tokens", 30, "--new-tokens", 40, "--runs", 1)
    done = soloist(
        "bench", "decode", "etude-draft", *options, "--sequences", 3, "--prediction", "--wrong",
        0.1, "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    plain, predicted = json.loads(done.out)
    assert (plain["sequences"], plain["columns"]) == (3, 3)
    assert plain["output_ids_sha256"] == predicted["output_ids_sha256"]
    assert predicted["tokens_per_round"] > 2
    assert predicted["accepted"] > 0.5
    alone = soloist("bench", "decode", "etude-draft", *options, "--temperature", 1, "--json")
    (one,) = json.loads(alone.out)
    # On a CPU each step of a request reads the weights for itself.
    assert plain["streamed_bytes_per_token"] == one["streamed_bytes_per_token"]
    moved = plain["streamed_bytes_per_token"] * plain["decode_tokens_per_s"]["median"]
    assert plain["mbu"] == pytest.approx(moved / plain["bandwidth_gb_per_s"] / 1e9, abs=0.002)


@pytest.mark.timed
def test_of_requests_side_by_side_one_has_a_prediction(soloist):
    options = ("--device", "cpu", "--prompt-tokens", 30, "--new-tokens", 400, "--runs", 1)
    options += ("--sequences", 3, "--prediction", "--predicted")

    def speeds():
        done = soloist("bench", "decode", "etude-draft", *options, 1, "--json")
        assert done.status == 0, done.err
        plain, predicted = json.loads(done.out)
        assert plain["output_ids_sha256"] == predicted["output_ids_sha256"]
        assert plain["predicted"] == predicted["predicted"] == 1
        # The mean of three, of which one has eight tokens a step.
        assert 2 < predicted["tokens_per_round"] < 3.5
        return [row["beside_tokens_per_s"]["median"] for row in (plain, predicted)]

    def keeps_its_speed(found):
        # By count it has as many: a step with drafts comes as seldom as it is long.
        before, now = found
        assert now > 0.6 * before

    judged(speeds, keeps_its_speed, tries=3)
    done = soloist("bench", "decode", "etude-draft", *options, 4)
    assert done.status != 0
    assert "--predicted" in done.err
    assert "1 … 3" in done.err


def test_the_prediction_of_a_text_is_what_follows_in_it(soloist, tmp_path):
    """Of a text whose rest is the answer all is right; of another one hardly anything."""
    prompt = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
    engine = Engine.load(EngineConfig("etude-draft", device="cpu"))
    *_, end = engine.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    answer = engine.tokenizer.decode(end.token_ids)
    seen = {}
    for name, rest in (("same.py", answer), ("other.py", "zebra 17 ?! " * 40)):
        (tmp_path / name).write_text(prompt + rest, encoding="utf-8")
        done = soloist(
            "bench", "decode", "etude-draft", "--device", "cpu", "--new-tokens", 40, "--runs", 1,
            "--temperature", 0, "--prompt-tokens", len(engine.tokenizer.encode(prompt)),
            "--text", tmp_path / name, "--prediction", "--json",
        )  # fmt: skip
        assert done.status == 0, done.err
        _, seen[name] = json.loads(done.out)
        assert seen[name]["text"] == name
    assert seen["same.py"]["accepted"] > 0.9
    assert seen["same.py"]["tokens_per_round"] > 4
    assert (seen["other.py"]["accepted"] or 0) < 0.2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_shape_in_any_precision_on_the_cpu(soloist, precision):
    options = ("--prompt-tokens", 8, "--new-tokens", 3, "--runs", 1, "--device", "cpu")
    done = soloist(
        "bench", "decode", "--shape", SHAPE, "--precision", precision, *options, "--json"
    )
    assert done.status == 0, done.err
    assert json.loads(done.out)[0]["precision"] == precision


@pytest.mark.gpu
@SUBJECTS
def test_columns_on_the_gpu(soloist, subject):
    options = ("--prompt-tokens", 40, "--new-tokens", 32, "--runs", 1, "--device", "cuda")
    one, eight = (
        json.loads(soloist("bench", "decode", *subject, *options, *more, "--json").out)[0]
        for more in ((), ("--columns", 8))
    )
    assert (one["columns"], eight["columns"]) == (1, 8)
    assert eight["streamed_bytes_per_token"] == one["streamed_bytes_per_token"]
    speed = eight["decode_tokens_per_s"]["median"]
    assert speed > 1.5 * one["decode_tokens_per_s"]["median"]
    moved = eight["streamed_bytes_per_token"] * speed / 8
    assert eight["mbu"] == pytest.approx(moved / eight["bandwidth_gb_per_s"] / 1e9, abs=0.002)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [(), ("--columns", 4)], ids=["one", "four"])
def test_sampled_runs_are_the_same_every_time(soloist, columns):
    options = ("--prompt-tokens", 40, "--new-tokens", 32, "--runs", 2, "--device", "cuda")
    greedy, sampled = (
        json.loads(
            soloist("bench", "decode", "--shape", SHAPE, *options, *columns, *more, "--json").out
        )[0]
        for more in ((), ("--temperature", 1))
    )
    assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
    assert " " not in sampled["output_ids_sha256"]
    assert sampled["output_ids_sha256"] != greedy["output_ids_sha256"]


@SUBJECTS
def test_saved_prompts_are_read_from_files(soloist, subject):
    done = soloist(
        "bench", "prefill", *subject, "--device", "cpu", "--prompt-tokens", 100,
        "--prompt-tokens", 600, "--runs", 2, "--prefix", "saved", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    rows = json.loads(done.out)
    assert [(row["prefix"], row["prompt_tokens"]) for row in rows] == [
        ("saved", 100),
        ("saved", 600),
    ]
    assert [row["cached_tokens"] for row in rows] == [0, 512]


@SUBJECTS
def test_of_kept_tokens_every_run_finds_as_many(soloist, subject):
    done = soloist(
        "bench", "prefill", *subject, "--device", "cpu", "--prompt-tokens", 500,
        "--kept", 256, "--kept", 300, "--runs", 2, "--no-page-attention", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    rows = json.loads(done.out)
    assert [(row["prefix"], row["prompt_tokens"]) for row in rows] == [("kept", 500)] * 2
    cached = "whole chunks of what was kept, though all of a run's prompt is cached afterwards"
    assert [row["cached_tokens"] for row in rows] == [256, 256], cached


@pytest.mark.parametrize(
    ("device", "subject"),
    [
        ("cpu", ("etude-draft",)),
        pytest.param("cuda", ("etude-draft",), marks=pytest.mark.gpu),
        pytest.param("cuda", ("--shape", SHAPE), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "model", "shape"],
)
def test_streams_go_on_while_a_prompt_is_read(soloist, device, subject):
    done = soloist(
        "bench", "prefill", *subject, "--device", device, "--prompt-tokens", 600, "--runs", 2,
        "--prefix", "cold", "--streams", 2, "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)
    assert (row["prefix"], row["cached_tokens"], row["streams"]) == ("cold", 0, 2)
    assert 0 < row["longest_gap_ms"]["median"] <= row["longest_gap_ms"]["max"]
    assert row["ttft_ms"]["median"] > 0


@pytest.mark.gpu
@SUBJECTS
def test_offloaded_prompts_come_back(soloist, subject):
    done = soloist(
        "bench", "prefill", *subject, "--device", "cuda", "--prompt-tokens", 700,
        "--runs", 2, "--prefix", "offloaded", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)
    assert row["prefix"] == "offloaded"
    assert 512 <= row["cached_tokens"] < 700


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--prefix", "offloaded"), "cold, warm, both, saved"),
        (("--streams", -1), "at least 0"),
        (("--streams", 8), "0 … 7"),
        (("--kept", 0), "at least 1"),
        (("--kept", 300), "fewer than the 300 tokens of --prompt-tokens"),
        (("--kept", 256, "--prefix", "warm"), "one of both options"),
        (("--page-attention",), "one or more Hopper GPUs"),
        (("--path", "decode"), "auto, prefill on the CPU"),
        (("--path", "both"), "prefill, decode, auto"),
        (("--packed-prompts",), "one or more Hopper GPUs"),
        (("--unpack-prompts",), "one or more GPUs"),
        (("--unpack-prompts", "--packed-prompts"), "one of both options"),
        (("--eight-bit-prompts", "--packed-prompts"), "one or more Hopper GPUs"),
        (("--eight-bit-prompts",), "add --packed-prompts, or leave out --eight-bit-prompts"),
    ],
)
def test_what_cannot_be_measured_of_prompts_is_refused(soloist, options, reason):
    prompt = ("--prompt-tokens", 300, "--device", "cpu")
    done = soloist("bench", "prefill", "etude-draft", *prompt, *options)
    assert done.status != 0
    assert reason in done.err


@SUBJECTS
def test_prefill_on_the_cpu(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    done = soloist(
        "bench", "prefill", *subject, "--device", "cpu", "--prompt-tokens", 100,
        "--prompt-tokens", 600, "--runs", 1, "-o", file, "--threshold", 0.9,
    )  # fmt: skip
    assert done.status == 0, done.err
    rows = json.loads(file.read_text())
    assert [(row["prefix"], row["prompt_tokens"]) for row in rows] == [
        ("cold", 100), ("cold", 600), ("warm", 100), ("warm", 600),
    ]  # fmt: skip
    assert [row["cached_tokens"] for row in rows[:2]] == [0, 0]
    assert 256 <= rows[3]["cached_tokens"] < 600, "whole chunks, never the last token"
    for row in rows:
        read = row["prompt_tokens"] - row["cached_tokens"]
        by_time = read / row["ttft_ms"]["median"] * 1e3
        assert row["prompt_tokens_per_s"]["median"] == pytest.approx(by_time, rel=0.01)
    assert "tokens/s read" in done.out


@pytest.mark.gpu
@SUBJECTS
def test_prefill_and_clocks_on_the_gpu(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    options = ("--prompt-tokens", 1500, "--runs", 2, "--device", "cuda", "-o", file)
    done = soloist("bench", "prefill", *subject, *options)
    assert done.status == 0, done.err
    cold, warm = json.loads(file.read_text())
    assert cold["cached_tokens"] == 0
    assert 512 <= warm["cached_tokens"] < 1500
    assert (cold["gpus"], warm["gpus"]) == (1, 1)
    for row in (cold, warm):
        if row["clocks"] is not None:  # NVML may be absent where CUDA is not
            assert row["clocks"]["readings"] >= 2
            assert 100 < row["clocks"]["sm_mhz"]["max"] < 5000


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["prefill", "decode", "auto"])
@SUBJECTS
def test_ends_of_prompts_are_read_either_way_on_the_gpu(soloist, subject, path):
    done = soloist(
        "bench", "prefill", *subject, "--prompt-tokens", 520, "--kept", 512, "--path", path,
        "--runs", 2, "--device", "cuda", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)
    assert (row["prefix"], row["cached_tokens"]) == ("kept", 512)
    assert f"--path {path}" in row["command"]


def test_accuracy_of_a_given_text(soloist, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x\n" * 20)
    options = ("bench", "accuracy", "etude-draft", "--text", text, "--device", "cpu")
    done = soloist(*options, "--positions", 30, "--json")
    assert json.loads(done.out)[0]["text"] == "text.py"
    refused = soloist(*options, "--positions", 4000)
    assert refused.status == 2
    assert "at least 4,001 tokens" in refused.err


@pytest.mark.gpu
def test_accuracy_of_prompts_in_eight_bits(soloist):
    """étude was not made for it: that costs more than 16-bit arithmetic, and not much."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    done = soloist(
        "bench", "accuracy", "etude", "--precision", "bf16", "--weights", "fp8", "--prompts",
        "--packed-prompts", "--eight-bit-prompts", "--positions", 64, "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    decode, prompts = json.loads(done.out)
    assert decode["engine"] == "soloist, decode kernel"
    assert prompts["engine"] == "soloist, prompts in 8 bits"
    assert decode["weights"] == prompts["weights"]
    assert len(decode["same_bits"]) == 5
    assert prompts["same_bits"] == []
    assert 0 < decode["mean_kl"] < prompts["mean_kl"] < 0.05


@SUBJECTS
def test_startup(soloist, tmp_path, subject):
    file = tmp_path / "rows.json"
    done = soloist("bench", "startup", *subject, "--device", "cpu", "--runs", 1, "-o", file)
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert row["bench"] == "startup"
    assert row["weights"] == row["precision"]
    assert row["kernels_built"] == 0
    assert row["executor"] == "reference"
    values = shipped_folder("etude-draft") / "model.safetensors"
    assert row["checkpoint_bytes"] == pytest.approx(values.stat().st_size, rel=0.01)
    assert row["gpu_memory_bytes"] is None
    parts = sum(row[name]["median"] for name in ("weights_s", "kernels_s", "rest_s"))
    assert row["total_s"]["median"] == pytest.approx(parts, abs=0.03)
    # A small model is read in less than the hundredth of a second that is told.
    assert 0 <= row["weights_s"]["median"] < row["rest_s"]["median"]


def test_startup_of_a_server(soloist, tmp_path):
    file = tmp_path / "rows.json"
    asked = ("bench", "startup", "etude-draft", "--serve", "--device", "cpu", "--runs", 1)
    done = soloist(*asked, "-o", file)
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert (row["program"], row["executor"]) == ("soloist serve", "reference")
    assert row["weights_s"] is row["rest_s"] is None
    assert 0 < row["ready_s"]["median"] < row["total_s"]["median"]
    assert "until ready" in done.out
    again = soloist("bench", "compare", file, file)
    assert "startup: etude-draft fp32 warm of soloist serve" in again.out, again.err


@pytest.mark.gpu
@pytest.mark.timed  # beside others a start with a cache can take longer than one without
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
    for row in (warm, cold):
        others = row["gpu_tensors_bytes"] - row["kv_cache_bytes"]
        assert row["checkpoint_bytes"] < others < row["gpu_memory_bytes"]


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
        (("accuracy", "etude", "--kv", "int3"), "int8, fp8, int4"),
        (("decode", "--shape", SHAPE, "--kv", "int3"), "int8, fp8, int4"),
        (("prefill", "--shape", SHAPE, "--kv", "fp8", "--page-attention"), "--page-attention"),
        (("prefill", "etude-draft", "--kv", "fp8", "--page-attention"), "--page-attention"),
        (("accuracy", "etude", "--positions", 70_000), "65,536"),
        (("accuracy", "etude", "--against", "vllm"), "vllm"),
        (("accuracy", "etude", "--repeats", -1), "--repeats"),
        (("accuracy", "etude-draft", "--device", "cpu", "--repeats", 2), "decode kernel only"),
        (("accuracy", "etude-draft", "--device", "cpu", "--prompts"), "decode kernel only"),
        (("accuracy", "etude-draft", "--packed-prompts"), "add --prompts"),
        (("accuracy", "etude-draft", "--no-packed-prompts"), "add --prompts"),
        (("accuracy", "etude-draft", "--prompts", "--eight-bit-prompts"), "add --packed-prompts"),
        (("accuracy", "etude", "--prompts", "--positions", 2049), "at most 2,048"),
        (("accuracy", "--shape", SHAPE, "--text", "x"), "--text"),
        (("accuracy", "etude-draft", "--device", "cpu", "--text", "nowhere"), "nowhere"),
        (("startup", "etude", "--shape", SHAPE), "MODEL"),
        (("prefill", "etude", "--shape", SHAPE), "MODEL"),
        (("prefill", "etude", "--prompt-tokens", 0), "--prompt-tokens"),
        (("prefill", "etude", "--prompt-tokens", 65_536), "65,535"),
        (("prefill", "etude", "--prefix", "hot"), "--prefix"),
        (("decode", "--shape", SHAPE, "--device", "cpu", "--columns", 2), "--columns"),
        (("decode", "--shape", SHAPE, "--prediction"), "--prediction"),
        (("decode", "--shape", SHAPE, "--speculate", "auto"), "--speculate"),
        (("decode", "etude-draft", "--wrong", 0.5), "--wrong"),
        (("decode", "etude-draft", "--device", "cpu", "--text", "nowhere.py"), "nowhere.py"),
        (("decode", "--shape", SHAPE, "--text", __file__), "--text"),
        (
            ("decode", "etude-draft", "--device", "cpu", "--text", SHAPE, "--prompt-tokens", 9999),
            "--prompt-tokens",
        ),
        (("decode", "--shape", SHAPE, "--temperature", 0.001), "temperature"),
        (("decode", "etude-draft", "--temperature", 101), "temperature"),
        (("decode", "etude-draft", "--temperature", 1, "--against", "transformers"), "--against"),
        (("decode", "etude-draft", "--prediction", "--wrong", 2), "--wrong"),
        (("decode", "etude-draft", "--prediction", "--against", "transformers"), "--against"),
        (("decode", "--shape", SHAPE, "--device", "cpu", "--context", 9), "--context"),
        (("serve", "http://127.0.0.1:9", "--config", SHAPE), "--bandwidth"),
        (("serve", "http://127.0.0.1:9", "--gpus", 2), "--gpus"),
        (("agent", "http://127.0.0.1:9", "--utilisation", 0.5), "--utilisation"),
        (("agent", "http://127.0.0.1:9", "--api-price", "cheap"), "--api-price"),
        (("neighbours", "http://127.0.0.1:9", "--only", "loud"), "--only"),
        (("neighbours", "http://127.0.0.1:9", "--pid", "x"), "--pid"),
        (("neighbours", "http://127.0.0.1:9", "--pid", "auto"), "--pid"),
        (("startup", "etude", "--runs", 0), "--runs"),
        (("startup", "etude", "--kernel-cache", "hot"), "--kernel-cache"),
        (("startup", "etude", "--gpus", 3), "--gpus"),
        (("prefill", "etude", "--gpus", 2, "--device", "cpu"), "--gpus"),
        (("prefill", "--shape", SHAPE, "--gpus", 2, "--device", "cpu"), "--gpus"),
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
    two = soloist("bench", "serve", toy.url, "http://127.0.0.1:9", "--api-key", "sk-1")
    assert (two.status, "once for each URL" in two.err) == (2, True), "no key goes elsewhere"
    unreachable = soloist("bench", "serve", toy.url)
    assert (unreachable.status, "hint: " in unreachable.err) == (3, True)
    assert soloist("bench", "serve", toy.url, "--prefix", "hot").status == 2


def test_utilisation_of_a_server_s_memory(soloist, tmp_path):
    """étude-draft in bf16 at a known speed, on a machine whose bandwidth is in a file."""
    machine, file = tmp_path / "bandwidth.json", tmp_path / "rows.json"
    row = {"bench": "bandwidth", "gb_per_s": {"median": 100.0, "min": 90.0, "max": 110.0}}
    machine.write_text(json.dumps([row]))
    config = json.loads(SHAPE.read_text())
    with serving(Toy(4, tokens_per_s=2000)) as toy:
        asked = ("bench", "serve", toy.url, "--prompt", "x" * 400, "-n", 100, "--runs", 1)
        known = ("--config", SHAPE, "--precision", "bf16", "--bandwidth", machine)
        done = soloist(*asked, *known, "--prefix", "warm", "-o", file)
        shared = soloist(*asked, *known, "--prefix", "warm", "--gpus", 2, "--json")
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert json.loads(shared.out)[0]["bandwidth_gb_per_s"] == 2 * row["bandwidth_gb_per_s"] == 200
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    kv_bytes = 2 * layers * heads * config["head_dim"] * 2 * (100 + 50)
    facts = json.loads(soloist("info", "etude-draft", "--json").out)
    weights = facts["by_precision"]["bf16"]["streamed_bytes_per_token"]
    assert row["streamed_bytes_per_token"] == weights + kv_bytes
    speed = row["decode_tokens_per_s"]["median"]
    assert row["mbu"] == pytest.approx((weights + kv_bytes) * speed / 100e9, abs=0.001)
    assert "MBU" in done.out


def test_an_agent_s_loop(soloist, tmp_path):
    file, page = tmp_path / "rows.json", tmp_path / "report.html"
    with serving(Toy(4, tokens_per_s=20_000)) as toy:
        done = soloist(
            "bench", "agent", toy.url, "--turns", 3, "--prompt-tokens", 100, "-n", 20, "--runs", 1,
            "--price", 3.6, "--utilisation", 0.5, "--api-price", "1/2", "-o", file, "--name", "toy",
        )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert (row["bench"], len(row["by_turn"]), row["turns"]) == ("agent", 3, 3)
    for words in ("by the machine", "× 3.6 an hour / 3600 / 0.5", "by the API"):
        assert words in done.out
    assert soloist("bench", "report", file, "-o", page).status == 0
    assert "agent: s a loop" in page.read_text()
    assert soloist("bench", "compare", file, file).status == 0


def test_neighbours_of_a_stream(soloist, tmp_path):
    file = tmp_path / "rows.json"
    with serving(Toy(4, tokens_per_s=2000)) as toy:
        asked = ("bench", "neighbours", toy.url, "--only", "choices", "-n", 40, "--runs", 1)
        done = soloist(*asked, "--api-key", "sk-secret", "--pid", "auto", "-o", file)
        assert done.status == 0, done.err
        toy.refuses = ("guided_choice",)
        again = soloist(*asked, "--json", "--api-key=sk-secret")
    alone, beside = json.loads(file.read_text())
    assert (alone["bench"], alone["neighbour"]) == ("neighbours", "none")
    assert (beside["neighbour"], beside["neighbour_statuses"]) == ("choices", ["200"])
    assert beside["memory_before_bytes"] > 10**7
    assert "sk-secret" not in file.read_text()
    assert "choices" in done.out
    assert json.loads(again.out)[1]["neighbour_statuses"] == ["400"]
