"""Several ranks on one GPU, each with SMs of its own, against the reference and each other."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from interpreter.models import CASES, CONTEXT, configured, prompt, reference_logits
from soloist.bench.agreement import forced_logits
from soloist.engine import Completion, Engine, EngineConfig, Request
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.loop import EngineLoop
from soloist.errors import LaunchError
from soloist.megakernel.attention_plan import AttentionPlan
from soloist.megakernel.choice import Choice
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import Plan
from soloist.megakernel.ranks import Ranks
from soloist.model.config import ModelConfig
from soloist.parallel.share import Share
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

TOKENS = 150  # three pages
CLEANER_CYCLES = 50_000  # longer than a layer of these models takes
# Relative error of all logits: what rounding to bf16 may do (tests/interpreter).
MOST_ERROR = 0.02


def spread(config: ModelConfig, plan: Plan, *, keep_rows: bool = True) -> KernelModel:
    """A model of random weights over the ranks of a plan, all on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    whole = {k: v.to(device, torch.bfloat16) for k, v in random_weights(config).items()}
    weights = [shard_all(Share(config, plan.ranks, rank), whole) for rank in range(plan.ranks)]
    devices = [device] * plan.ranks
    return load_kernel(plan, weights, devices, Capacity(CONTEXT), None, keep_rows=keep_rows)


def ranks_of(model: KernelModel) -> Ranks:
    assert isinstance(model.decoder, Ranks)
    return model.decoder


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name: str, ranks: int, tmp_path: Path) -> None:
    config, plan = configured(name, tmp_path, ranks=ranks)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    model = spread(config, plan)
    one_by_one = forced_logits(model.decoder, config.vocab_size, ids, 1, TOKENS)
    error = (one_by_one.cpu() - wanted).norm() / wanted.norm()
    assert error < MOST_ERROR
    for queries in (2, 5):
        again = forced_logits(model.decoder, config.vocab_size, ids, queries, TOKENS)
        assert torch.equal(again, one_by_one)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["smollm3-nope-64", "qwen3-wide-32"])
def test_no_bit_depends_on_when_buffers_are_cleaned(name: str, ranks: int, tmp_path: Path) -> None:
    """With as many queries as there are, one rank's cleaner or all of them late by a layer."""
    config, plan = configured(name, tmp_path, ranks=ranks)
    decoder = spread(config, plan).decoder
    ids = prompt(config, 96)
    wanted = forced_logits(decoder, config.vocab_size, ids, 1, 96)
    assert torch.equal(forced_logits(decoder, config.vocab_size, ids, MAX_QUERIES, 96), wanted)
    parts = decoder.decoders if isinstance(decoder, Ranks) else [decoder]
    for late in (parts[-1:], parts):
        for part in late:
            part.load(Build(cleaner_cycles=CLEANER_CYCLES))
        for queries in (1, MAX_QUERIES):
            again = forced_logits(decoder, config.vocab_size, ids, queries, 96)
            assert torch.equal(again, wanted), f"{queries} queries, {len(late)} late"


@pytest.mark.parametrize("name", ["qwen3-norms-128", "mistral-window-96"])
def test_logits_of_queries_whose_cache_is_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttentionPlan, "unsplit_positions", property(lambda _: 64))
    config, plan = configured(name, tmp_path, ranks=4)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    decoder = spread(config, plan).decoder
    one_by_one = forced_logits(decoder, config.vocab_size, ids, 1, TOKENS)
    assert (one_by_one.cpu() - wanted).norm() / wanted.norm() < MOST_ERROR
    assert torch.equal(forced_logits(decoder, config.vocab_size, ids, 5, TOKENS), one_by_one)


@pytest.mark.parametrize("keep_rows", [True, False], ids=["rows", "unpacked"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "name", ["llama-untied-biases-32", "llama-one-kv-head-128", "mistral-window-96"]
)
def test_the_kernel_goes_on_where_prefill_ended(
    name: str, ranks: int, keep_rows: bool, tmp_path: Path
) -> None:
    config, plan = configured(name, tmp_path, ranks=ranks)
    weights = {k: v.to(torch.bfloat16) for k, v in random_weights(config).items()}
    ids = prompt(config, TOKENS)
    wanted = reference_logits(config, weights, ids)
    model = spread(config, plan, keep_rows=keep_rows)
    for start, stop in pairwise([0, 70, 101, TOKENS - 20]):
        logits = model.prefill.run(ids[start:stop], start, model.page_tables[0])
        assert logits is not None
        error = (logits.cpu() - wanted[stop - 1]).norm() / wanted[stop - 1].norm()
        assert error < 0.03
    first = TOKENS - 20
    kept = torch.zeros(20, 1, model.decoder.logits.shape[1], device="cuda")
    model.decoder.run([Query(0, first, ids[first:])], 20, logits=kept)
    seen = kept[:, 0, : config.vocab_size].cpu()
    assert (seen - wanted[first:]).norm() / wanted[first:].norm() < MOST_ERROR


def test_all_ranks_choose_alike_again_and_again(tmp_path: Path) -> None:
    config, plan = configured("qwen3-norms-128", tmp_path, ranks=4)
    ranks = ranks_of(spread(config, plan))
    query = Query(0, 0, prompt(config, 20))
    made = ranks.run([query], 150)
    chosen = [d._shown[:150, 0].tolist() for d in ranks.decoders]
    assert chosen == [[token for (token,) in made]] * 4
    for _ in range(20):
        assert ranks.run([query], 150) == made


def test_a_launch_of_ranks_stops_on_request(tmp_path: Path) -> None:
    config, plan = configured("llama-tied-64", tmp_path, ranks=2)
    ranks = ranks_of(spread(config, plan))
    for choice in (None, Choice(*_sampled(config.vocab_size))):
        query = Query(0, 0, [1], choice=choice)
        ranks.start([query], 150)
        ranks.stop()
        made = list(ranks.tokens())
        assert 1 <= len(made) <= 150
        assert ranks.run([query], len(made)) == made


def _sampled(vocab_size: int) -> tuple[SamplingParams, object, frozenset[int]]:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), vocab_size, [1])
    return sampler.params, sampler.counts, frozenset()


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config, plan = configured("llama-tied-64", tmp_path, ranks=2)
    decoders = ranks_of(spread(config, plan)).decoders
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    object.__setattr__(plan, "blocks", num_sms)
    with pytest.raises(LaunchError, match=f"{2 * num_sms} blocks.*{num_sms} SMs"):
        Ranks(decoders)


# Sampling -----------------------------------------------------------------------------------------

PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3}
PARAMS = {
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_k": SamplingParams(temperature=1.5, seed=2, top_k=20),
    "filters": SamplingParams(temperature=2.0, seed=5, top_k=40, top_p=0.95, min_p=0.02),
    "penalties": SamplingParams(temperature=0.7, seed=6, **PENALTIES),
    "greedy-bias": SamplingParams(logit_bias={11: 3.0, 8000: 2.0}),
    "all": SamplingParams(
        temperature=1.3, seed=9, logit_bias={11: 2.0}, top_p=0.9, top_k=50, min_tokens=20,
        stop_token_ids=frozenset(range(200, 460)), **PENALTIES,
    ),
}  # fmt: skip


@cache
def engine(ranks: int, _for: str = "requests") -> Engine:
    """étude on so many ranks that share GPU 0, or on one.

    Launches by hand have one of their own: requests take pages as they like.
    """
    shared = (0,) * ranks if ranks > 1 else ()
    asked = EngineConfig(
        "etude", device="cuda:0", context_tokens=2048, sequences=2, rank_devices=shared
    )
    loaded = Engine.load(asked)
    assert loaded.report.executor == "decode kernel"
    assert isinstance(loaded.model, KernelModel)
    assert loaded.model.plan.ranks == ranks
    return loaded


def kernel_model(ranks: int) -> KernelModel:
    model = engine(ranks, "launches").model
    assert isinstance(model, KernelModel)
    return model


def ids_of(text: str) -> list[int]:
    return engine(1).tokenizer.encode(text)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("names", [[n] for n in PARAMS] + [["filters", "greedy"]], ids="-".join)
def test_sampled_tokens_are_the_definitions(names: Sequence[str], ranks: int) -> None:
    decoder, vocab = kernel_model(ranks).decoder, engine(1).config.vocab_size
    ids = ids_of("def fibonacci(n):\n    a, b = 0, 1\n")
    samplers = [Sampler(PARAMS.get(n, SamplingParams()), vocab, ids) for n in names]
    decoder.run([Query(s, 0, ids[:-1]) for s in range(len(samplers))], len(ids) - 1)
    last, made = [ids[-1]] * len(samplers), 0
    for rounds in (1, 37, 64):
        kept = torch.zeros(rounds, len(samplers), decoder.logits.shape[1], device="cuda")
        position = len(ids) - 1 + made
        choices = [
            None if s.params == SamplingParams()
            else Choice(s.params, s.counts, s.stop_test.ending_ids)
            for s in samplers
        ]  # fmt: skip
        queries = [Query(s, position, [last[s]], choice=c) for s, c in enumerate(choices)]
        tokens = decoder.run(queries, rounds, logits=kept)
        assert len(tokens) == rounds
        for r, row in enumerate(tokens):
            for s, sampler in enumerate(samplers):
                logits = kept[r, s, :vocab].cpu()
                assert row[s] == sampler.pick(logits, position + r + 1), f"round {made + r}"
                sampler.observe(row[s])
        last, made = tokens[-1], made + rounds


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_ranks_heed_the_hosts_masks(ranks: int) -> None:
    decoder, vocab, rounds = kernel_model(ranks).decoder, engine(1).config.vocab_size, 40
    allowed = torch.rand(rounds, vocab, generator=torch.Generator().manual_seed(1)) < 0.01
    words = [
        np.packbits(np.pad(row.numpy(), (0, -vocab % 32)), bitorder="little").view(np.uint32)
        for row in allowed
    ]
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), vocab, [5])
    choice = Choice(sampler.params, sampler.counts, frozenset(), words[0])
    kept = torch.zeros(rounds, 1, decoder.logits.shape[1], device="cuda")
    decoder.start([Query(0, 0, [5], choice=choice)], rounds, logits=kept)
    made = []
    for (token_id,) in decoder.tokens():
        made.append(token_id)
        if len(made) < rounds:
            decoder.allow(0, words[len(made)])
    logits = kept[:, 0, :vocab].cpu().where(allowed, -torch.inf)
    assert made == [sampler.pick(row, r + 1) for r, row in enumerate(logits)]
    decoder.start([Query(0, 0, [5], choice=choice)], rounds)
    decoder.abandon()
    assert len(list(decoder.tokens())) < rounds


# Whole requests -----------------------------------------------------------------------------------

REQUESTS = {
    "riding": ("def f(x):\n", SamplingParams(max_tokens=100, ignore_eos=True)),
    "long": ("import os\n\nclass A:\n    x = 1\n" * 60, SamplingParams(max_tokens=60)),
    "sampled": ("for i in range(", SamplingParams(max_tokens=50, temperature=0.7, seed=4)),
}
# How much worse by one rank's logits a token may be than the best one: both round to bf16.
NEAR_TIE = 0.25


def require_near_ties(ids: list[int], made: list[int]) -> None:
    """Greedy tokens are the best ones by the logits of one rank, or nearly."""
    vocab = engine(1).config.vocab_size
    logits = forced_logits(kernel_model(1).decoder, vocab, [*ids, *made[:-1]], 8, 512)
    logits = logits[len(ids) - 1 :].cpu()
    chosen = logits[torch.arange(len(made)), made]
    assert (logits.amax(1) - chosen).max() < NEAR_TIE
    assert (logits.argmax(1) == torch.tensor(made)).float().mean() > 0.9


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["riding", "long"])
def test_requests_are_those_of_one_gpu_but_for_near_ties(name: str, ranks: int) -> None:
    text, params = REQUESTS[name]
    *_, end = engine(ranks).generate(text, params)
    assert isinstance(end, Completion)
    require_near_ties(ids_of(text), list(end.token_ids))


@pytest.mark.parametrize("ranks", [2, 8])
def test_requests_on_ranks_repeat_and_share_launches(ranks: int) -> None:
    own = engine(ranks)
    loop = EngineLoop(own.model, own.tokenizer, own.config.vocab_size)
    try:
        asked = [(ids_of(text), params) for text, params in REQUESTS.values()]
        alone = [_end(loop, *x) for x in asked]
        assert [_end(loop, *x) for x in asked] == alone
        tickets = [loop.submit(*x, top_logprobs=2) for x in asked]
        together = [_finished(t) for t in tickets]
        assert together == alone
    finally:
        loop.close()


def _end(loop: EngineLoop, ids: list[int], params: SamplingParams) -> tuple[int, ...]:
    return _finished(loop.submit(ids, params))


def _finished(ticket: Request) -> tuple[int, ...]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for event in ticket.take():
            if isinstance(event, Completion):
                return event.token_ids
        time.sleep(0.001)
    raise AssertionError("the request does not end")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ["riding", "long"])
def test_requests_on_two_gpus_are_those_of_one_but_for_near_ties(name: str) -> None:
    text, params = REQUESTS[name]
    apart = Engine.load(EngineConfig("etude", device="cuda", context_tokens=2048, gpus=2))
    assert apart.resolved.num_gpus == 2
    *_, end = apart.generate(text, params)
    assert isinstance(end, Completion)
    require_near_ties(ids_of(text), list(end.token_ids))
    *_, again = apart.generate(text, params)
    assert isinstance(again, Completion)
    assert again.token_ids == end.token_ids


@pytest.mark.gpus(2)
def test_the_command_line_names_the_gpus(soloist: Callable[..., object]) -> None:
    done = soloist("run", "etude", "-p", "def f(", "-n", 8, "--device", "cuda", "--gpus", 2)
    assert done.status == 0, done.err
    assert "on 2 × " in done.err


# Faults -------------------------------------------------------------------------------------------

STUCK = """
import os, sys
from soloist.engine import Engine, EngineConfig
from soloist.errors import KernelStuck
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query

asked = EngineConfig("etude", device="cuda:0", context_tokens=256, rank_devices=(0, 0))
ranks = Engine.load(asked).model.decoder
first, second = ranks.decoders
first.load(Build(stuck_ns=int(sys.argv[1])))
second.load(Build(silent_block=3, stuck_ns=int(sys.argv[2])))
try:
    ranks.run([Query(0, 0, [1])], 4)
except KernelStuck as error:
    print(error.message, flush=True)
os._exit(0)  # the context is lost, and tidying up would say so
"""
SOON, LATE = 100_000_000, 2_000_000_000


@pytest.mark.parametrize(
    ("limits", "facts"),
    [
        ((SOON, LATE), [
            "rank 0 on GPU 0: block ", "round 0, layer 0, phase attention_output",
            "waits for partial sums or choices of rank 1", "rank 1 on GPU 0 reported nothing",
        ]),
        ((LATE, SOON), [
            "rank 1 on GPU 0: block ", "round 0, layer 0, phase qkv",
            "waits for the residual stream of all blocks", "rank 0 on GPU 0 reported nothing",
        ]),
    ],
    ids=["who waits", "who is stuck"],
)  # fmt: skip
def test_a_stuck_rank_is_named(limits: tuple[int, int], facts: list[str]) -> None:
    """In a process of its own: the trap ends the GPU's context, and with it the other rank."""
    command = [sys.executable, "-c", STUCK, *map(str, limits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    for fact in facts:
        assert fact in done.stdout, done.stdout + done.stderr
