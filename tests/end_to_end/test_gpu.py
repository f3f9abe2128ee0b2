"""étude on the decode kernel: the reference's tokens, cancelling, one request after the other."""

import json
from functools import cache

import pytest
import torch

from soloist.engine import Cancel, Chunk, Completion, Engine, EngineConfig
from soloist.engine import kernel as kernel_module
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.folder import shipped_folder
from soloist.reference.build import build_reference
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.reading import load_weights

pytestmark = pytest.mark.gpu

PROMPTS = (
    "def fibonacci(n):\n",
    "x = 1",
    "import os\nimport sys\n\n\ndef main(arguments):\n    for argument in arguments:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n" * 12,
)
# How much worse in fp32 a token may be than the best one, for 16-bit arithmetic to take it.
NEAR_TIE = 0.25


@cache
def engine() -> Engine:
    loaded = Engine.load(EngineConfig("etude", device="cuda"))
    assert loaded.report.executor == "decode kernel", loaded.report.refusal
    return loaded


@cache
def reference():
    config = engine().config
    checkpoint = open_checkpoint(shipped_folder("etude"))
    weights = load_weights(checkpoint, tensors(config), Dtype.FP32, torch.device("cpu"))
    return build_reference(config, weights)


def logits_on_the_way(prompt: list[int], made: list[int]) -> torch.Tensor:
    """[N, V] of the reference in fp32: what each of the tokens made was chosen from."""
    ids = torch.tensor(prompt + made[:-1])
    logits = reference().forward(ids, 0, reference().new_cache(len(ids)), "all")
    assert logits is not None
    return logits[len(prompt) - 1 :]


def answer(prompt: str | list[int], params: SamplingParams) -> Completion:
    *_, end = engine().generate(prompt, params)
    assert isinstance(end, Completion)
    return end


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "tiny", "medium", "long"])
def test_greedy_tokens_are_the_references(prompt: str) -> None:
    ids = engine().tokenizer.encode(prompt)
    made = list(answer(prompt, SamplingParams(max_tokens=64, ignore_eos=True)).token_ids)
    assert len(made) == 64
    logits = logits_on_the_way(ids, made)
    chosen = logits[torch.arange(len(made)), made]
    assert (logits.amax(1) - chosen).max() < NEAR_TIE
    assert (logits.argmax(1) == torch.tensor(made)).float().mean() > 0.9


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 23, 24, 25, 40, 63, 64, 65, 300, 2100])
def test_prompts_of_every_kind_of_length(length: int) -> None:
    ids = (engine().tokenizer.encode(PROMPTS[2]) * 200)[:length]
    made = list(answer(ids, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids)
    logits = logits_on_the_way(ids, made)
    assert (logits.amax(1) - logits[torch.arange(8), made]).max() < NEAR_TIE


def test_the_same_prompt_gives_the_same_tokens_whatever_came_before() -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    before = answer(PROMPTS[0], params).token_ids
    answer(PROMPTS[3], SamplingParams(max_tokens=10, temperature=1.0, seed=1))
    assert answer(PROMPTS[0], params).token_ids == before


def test_the_kernel_that_samples_takes_the_greedy_tokens() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    # A bias on a token that never wins asks for it.
    other = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={0: -100.0})
    assert answer(PROMPTS[0], params).token_ids == answer(PROMPTS[0], other).token_ids


def test_sampled_tokens_are_the_references() -> None:
    prompt = engine().tokenizer.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
    made = list(answer(prompt, params).token_ids)
    sampler = Sampler(params, engine().config.vocab_size, prompt)
    same = 0
    for i, logits in enumerate(logits_on_the_way(prompt, made)):
        same += sampler.pick(logits, len(prompt) + i) == made[i]
        sampler.observe(made[i])
    assert same >= 14


def test_stop_tokens_end_the_launch() -> None:
    free = answer(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True)).token_ids
    stop = free[20]
    end = answer(
        PROMPTS[0],
        SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=frozenset({stop})),
    )
    assert end.finish_reason == "stop"
    assert end.token_ids == free[: free.index(stop) + 1]


def test_cancelled_and_the_next_request() -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    cancel, seen = Cancel(), 0
    for event in engine().generate(PROMPTS[0], params, cancel):
        if isinstance(event, Chunk):
            seen += len(event.token_ids)
            if seen >= 10:
                cancel()
        else:
            assert event.finish_reason == "cancelled"
            assert event.timings.new_tokens < 4000
    assert len(answer(PROMPTS[1], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5


def test_left_alone_and_the_next_request() -> None:
    source = engine().generate(PROMPTS[0], SamplingParams(max_tokens=4000, ignore_eos=True))
    next(source)
    source.close()
    assert len(answer(PROMPTS[1], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5


def test_weights_that_do_not_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill from unpacked matrices, loaded by way of the host, gives the same tokens."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    asked = EngineConfig("etude", device="cuda", packed_prompts=False)
    *_, wanted = Engine.load(asked).generate(PROMPTS[3], params)
    assert isinstance(wanted, Completion)
    built = kernel_module.load_kernel

    def without_rows(*args, keep_rows: bool, **kwargs):
        assert keep_rows
        return built(*args, keep_rows=False, **kwargs)

    monkeypatch.setattr("soloist.engine.kernel.load_kernel", without_rows)
    *_, end = Engine.load(asked).generate(PROMPTS[3], params)
    assert isinstance(end, Completion)
    assert end.token_ids == wanted.token_ids


def test_fp32_runs_on_the_reference_and_says_so(soloist) -> None:
    done = soloist(
        "run", "etude-draft", "-p", "x = 1", "-n", 4, "--device", "cuda", "--precision", "fp32"
    )
    assert done.status == 0
    assert "fp32 weights" in done.err
    assert "running the reference" in done.err


def test_run_names_the_kernel(soloist) -> None:
    done = soloist("run", "etude", "-p", "def f(", "-n", 4, "--device", "cuda")
    assert done.status == 0
    assert "decode kernel" in done.err


@pytest.mark.timed
@pytest.mark.parametrize(
    "options",
    [(), ("--columns", 8), ("--sequences", 4), ("--sequences", 2, "--columns", 2),
     ("--context", 4000)],
    ids=["one", "queries", "sequences", "both", "context"],
)  # fmt: skip
def test_bench_of_a_shape(soloist, tmp_path, options) -> None:
    file = tmp_path / "row.json"
    config = shipped_folder("etude") / "config.json"
    done = soloist(
        "bench", "decode", "--shape", config, "--prompt-tokens", 128, "--new-tokens", 64,
        "--runs", 2, *options, "-o", file,
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(file.read_text())
    assert row["gpus"] == 1
    assert row["ttft_ms"]["median"] > 0
    assert 0 < row["mbu"] < 1.2
    assert len(row["output_ids_sha256"].split()) == 1, "every run makes the same tokens"
