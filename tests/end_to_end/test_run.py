"""What a user sees when all is well."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from soloist.text import Tokenizer

COMMAND = [sys.executable, "-m", "soloist"]


def test_text_on_stdout_and_figures_on_stderr(soloist):
    done = soloist("run", "etude", "--prompt", "def fibonacci(n):\n", "-n", 24)
    assert done.status == 0
    assert done.out.strip()
    for figure in ("TTFT", "decode", "tokens/s", "prompt + 24 new", "total", "finished: length"):
        assert figure in done.err


def test_etude_writes_python(soloist):
    prompt = "class Point:\n    def __init__(self, x, y):\n"
    done = soloist("run", "etude", "--prompt", prompt, "-n", 16)
    assert "self.x = x" in done.out


def test_json_holds_everything(soloist):
    done = soloist("run", "etude-draft", "--prompt", "import ", "-n", 8, "--json")
    report = json.loads(done.out)
    assert len(report["token_ids"]) == report["timings"]["new_tokens"] == 8
    assert report["finish_reason"] == "length"
    assert report["timings"]["prompt_tokens"] >= 1
    assert 0 < report["timings"]["ttft_s"] < report["timings"]["total_s"]
    assert report["timings"]["decode_tokens_per_s"] > 0


def test_prompt_from_stdin_equals_prompt_from_option(soloist):
    text = "def höhe(größe):\n    return"
    piped = soloist("run", "etude-draft", "--prompt", "-", "-n", 8, stdin=text.encode())
    given = soloist("run", "etude-draft", "--prompt", text, "-n", 8)
    assert piped.out == given.out


def test_same_seed_same_text_another_seed_another_text(soloist):
    def text(seed: int) -> str:
        return soloist(
            "run", "etude-draft", "-p", "def ", "-n", 24, "-t", 1.0, "--seed", seed
        ).out  # fmt: skip

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_drawn_seed_is_shown_and_repeats_the_text(soloist):
    first = soloist("run", "etude-draft", "-p", "def ", "-n", 16, "-t", 1.0)
    seed = first.err.rsplit("seed ", 1)[1].strip()
    again = soloist("run", "etude-draft", "-p", "def ", "-n", 16, "-t", 1.0, "--seed", seed)
    assert again.out == first.out


def test_stop_string_ends_the_text_before_it(soloist):
    whole = soloist("run", "etude", "-p", "def f(a, b):\n", "-n", 32).out
    stop = whole[10:13]
    cut = soloist("run", "etude", "-p", "def f(a, b):\n", "-n", 32, "--stop", stop)
    assert cut.out == whole[: whole.index(stop)] + "\n"
    assert "finished: stop" in cut.err


def test_logit_bias_decides_a_token(soloist):
    done = soloist("run", "etude-draft", "-p", "x", "-n", 3, "--logit-bias", "100:100", "--json")
    assert json.loads(done.out)["token_ids"] == [100, 100, 100]


def test_fill_in_the_middle_shows_the_model_both_sides(soloist):
    before, after = "def add(a, b):\n", "\n    return total\n"

    def report(*more: str) -> dict:
        return json.loads(soloist("run", "etude", "-p", before, "-n", 24, "--json", *more).out)

    filled, continued = report("--suffix", after), report()
    added = filled["timings"]["prompt_tokens"] - continued["timings"]["prompt_tokens"]
    assert added > 3, "three marks and the suffix"
    assert filled["text"] != continued["text"]


def test_chat_answers_every_line_and_remembers(soloist):
    script = "write a function that adds two numbers\n/reset\n/what\nimport json\n/exit\nignored\n"
    done = soloist("chat", "etude-draft", "-n", 8, stdin=script.encode())
    assert done.status == 0
    assert done.err.count("TTFT") == 2
    assert "forgotten" in done.err
    assert "unknown command /what" in done.err


def test_chat_reads_only_what_is_new(soloist):
    script = ("word " * 200) + "\nx\n"
    done = soloist("chat", "etude-draft", "-n", 8, stdin=script.encode())
    assert done.status == 0
    assert done.err.count("cached") == 1, "the second turn begins as the first"


def test_chat_refuses_a_turn_that_does_not_fit_and_goes_on(soloist):
    script = ("word " * 100) + "\nx\n"
    done = soloist("chat", "etude-draft", "-n", 8, "--context", 64, stdin=script.encode())
    assert done.status == 0
    assert "context holds 64" in done.err
    assert done.err.count("TTFT") == 1


def test_info_agrees_with_the_files(soloist):
    facts = json.loads(soloist("info", "etude", "--json").out)
    assert facts["family"] == "qwen3"
    assert 10e6 <= facts["parameters"] <= 20e6
    fp16 = facts["by_precision"]["fp16"]
    assert fp16["weights_bytes"] == 2 * facts["parameters"]
    assert fp16["streamed_bytes_per_token"] == 2 * facts["parameters"]  # the head is tied
    assert fp16["kv_bytes_per_token"] == 2 * 2 * 8 * 2 * 64  # bytes, K and V, layers, heads, dim
    assert "parameters" in soloist("info", "etude").out


def test_info_tells_what_a_smaller_kv_cache_takes(soloist):
    facts = {
        kv: json.loads(soloist("info", "etude", "--json", *(("--kv", kv) if kv else ())).out)
        for kv in ("", "int8", "int4")
    }
    bytes_of = {kv: f["by_precision"]["fp32"]["kv_bytes_per_token"] for kv, f in facts.items()}
    values = 2 * 8 * 2 * 64  # K and V, layers, heads, dim
    assert bytes_of == {"": 4 * values, "int8": values * 66 // 64, "int4": values * 36 // 64}
    assert facts["int4"]["kv"] == "int4"
    assert "of KV cache in int4 for each token" in soloist("info", "etude", "--kv", "int4").out


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_run_with_a_kv_cache_in_fewer_bits(soloist, kv):
    done = soloist("run", "etude", "-p", "def add(a, b):", "-n", 12, "--device", "cpu", "--kv", kv)
    assert done.status == 0, done.err
    assert f"KV cache {kv}" in done.err
    assert "12 new tokens" in done.err
    told = json.loads(
        soloist("run", "etude", "-p", "x", "-n", 1, "--device", "cpu", "--kv", kv, "--json").out
    )
    assert (told["kv"], told["precision"]) == (kv, "fp32")


def test_an_unknown_kv_cache_is_refused(soloist):
    done = soloist("run", "etude", "-p", "x", "--kv", "int3")
    assert done.status == 2
    assert "int8, fp8, int4" in done.err


def test_bench_writes_a_result_file(soloist, tmp_path):
    file = tmp_path / "result.json"
    done = soloist(
        "bench", "decode", "etude-draft", "--prompt-tokens", 8, "--new-tokens", 8, "--runs", 2,
        "--against", "transformers", "--device", "cpu", "-o", file,
    )  # fmt: skip
    assert done.status == 0
    rows = json.loads(file.read_text())
    assert rows[0]["engine"] == "soloist"
    for row in rows:
        assert row["decode_tokens_per_s"]["min"] <= row["decode_tokens_per_s"]["median"]
        assert row["ttft_ms"]["median"] > 0
        assert {"shape", "device", "gpus", "precision", "columns", "mbu", "commit"} <= row.keys()
    assert len({row["output_ids_sha256"] for row in rows}) == 1, "same weights, same greedy text"


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys\n"
        "from soloist.cli import main\n"
        "try:\n    main(['run', '--help'])\n"
        "finally:\n    assert not {'torch', 'numpy', 'transformers'} & sys.modules.keys()\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--prompt" in done.stdout
    assert time.perf_counter() - start < 5


def test_info_imports_no_torch():
    code = (
        "import sys\n"
        "from soloist.cli import main\n"
        "try:\n    main(['info', 'etude-draft'])\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a process")
def test_ctrl_c_stops_cleanly_and_prints_figures():
    with subprocess.Popen(
        [*COMMAND, "run", "etude", "-p", "def f():", "-n", "8000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"finished: cancelled" in err
    assert b"TTFT" in err
    assert b"Traceback" not in err


def test_python_api_streams_what_the_command_line_prints():
    from soloist import Engine, EngineConfig, SamplingParams
    from soloist.engine import Chunk, Completion

    engine = Engine.load(EngineConfig("etude-draft"))
    events = list(engine.generate("def f(", SamplingParams(max_tokens=12)))
    *chunks, end = events
    assert isinstance(end, Completion)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == end.text
    assert end.text == Tokenizer.decode(engine.tokenizer, end.token_ids)


def test_a_prediction_gives_the_same_text_and_is_counted(soloist, tmp_path):
    asked = ("run", "etude-draft", "--prompt", "def add(a, b):", "--max-tokens", 60, "--ignore-eos")
    plain = json.loads(soloist(*asked, "--speculate", "off", "--json").out)
    assert plain["timings"]["drafts"]["rounds"] == 0
    file = tmp_path / "old.py"
    file.write_text(plain["text"])
    told = json.loads(soloist(*asked, "--prediction", file, "--json").out)
    assert told["token_ids"] == plain["token_ids"]
    assert told["timings"]["drafts"]["predicted_accepted"] > 30
    assert told["timings"]["tokens_per_round"] > 3
    assert "drafted tokens accepted" in soloist(*asked, "--prediction", file).err


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, (), "cannot be read"),
        (b"\xff\xfe", (), "not UTF-8"),
        (b"a", ("--speculate", "off"), "--speculate off"),
        (b"a", ("--speculate", "on"), "auto, off"),
        (b"word " * 200, ("--context", 40, "--max-tokens", 8), "the prediction has"),
    ],
)
def test_bad_predictions_are_told(soloist, tmp_path, content, options, words):
    file = tmp_path / "old.txt"
    if content is not None:
        file.write_bytes(content)
    done = soloist("run", "etude-draft", "--prompt", "a", "--prediction", file, *options)
    assert done.status == 2
    assert words in done.err
