"""étude on the kernel that samples: the tokens of soloist.sampling from the kernel's own logits."""

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from soloist.engine import Cancel, Chunk, Completion, Engine, EngineConfig
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.support import find_support
from soloist.megakernel.abi import MAX_STOPS
from soloist.megakernel.choice import Choice
from soloist.megakernel.launch import Query
from soloist.megakernel.sampling_header import bad_score
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import shipped_folder
from soloist.sampling import Sampler, SamplingParams
from soloist.settings import read_settings
from soloist.weights.reading import load_weights

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 200
PROMPT = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n"

FILTERS = {"top_k": 40, "top_p": 0.95, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3}
# So many tokens end generation that the ban is felt.
ENDING = {"min_tokens": 60, "stop_token_ids": frozenset(range(200, 460))}
PARAMS = {
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "hot": SamplingParams(temperature=5.0, seed=2**64 - 1),
    "top_k": SamplingParams(temperature=1.5, seed=2, top_k=20),
    "top_p": SamplingParams(temperature=1.5, seed=3, top_p=0.9),
    "min_p": SamplingParams(temperature=1.5, seed=4, min_p=0.05),
    "filters": SamplingParams(temperature=2.0, seed=5, **FILTERS),
    "penalties": SamplingParams(temperature=0.7, seed=6, **PENALTIES),
    "bias": SamplingParams(temperature=0.7, seed=7, logit_bias={11: 6.0, 200: 4.0, 5000: -100.0}),
    "min_tokens": SamplingParams(temperature=1.0, seed=8, **ENDING),
    "greedy-penalties": SamplingParams(**PENALTIES),
    "greedy-bias": SamplingParams(logit_bias={11: 3.0}),
    "greedy-min_tokens": SamplingParams(**ENDING),
    "all": SamplingParams(
        temperature=1.3, seed=9, logit_bias={11: 2.0}, **FILTERS, **PENALTIES, **ENDING
    ),
}


@cache
def engine() -> Engine:
    return Engine.load(EngineConfig("etude", device="cuda"))


@cache
def model() -> KernelModel:
    """Two sequences; the engine's model has one."""
    folder, device = shipped_folder("etude"), torch.device("cuda:0")
    config = read_config(folder / "config.json")
    support = find_support(config, Dtype.BF16, device)
    assert support.plan is not None, support.refusal
    weights = load_weights(open_checkpoint(folder), tensors(config), Dtype.BF16, device)
    capacity, cache = Capacity(1024, sequences=2), read_settings().cache
    return load_kernel(support.plan, [weights], [device], capacity, cache, keep_rows=True)


@cache
def prompt_ids() -> tuple[int, ...]:
    return tuple(engine().tokenizer.encode(PROMPT))


def samplers_of(*requests: SamplingParams) -> list[Sampler]:
    return [Sampler(p, engine().config.vocab_size, prompt_ids()) for p in requests]


def choice_of(sampler: Sampler) -> Choice | None:
    if sampler.params == SamplingParams():
        return None
    return Choice(sampler.params, sampler.counts, sampler.stop_test.ending_ids)


def decode(samplers: Sequence[Sampler], most_rounds: int, rounds: int = NUM_ROUNDS):
    """Tokens of one sequence a sampler, each what its sampler picks from the logits kept."""
    decoder, vocab = model().decoder, engine().config.vocab_size
    ids = prompt_ids()
    decoder.run([Query(s, 0, ids[:-1]) for s in range(len(samplers))], len(ids) - 1)
    made: list[list[int]] = []
    last = [ids[-1]] * len(samplers)
    while len(made) < rounds:
        here, position = min(most_rounds, rounds - len(made)), len(ids) - 1 + len(made)
        kept = torch.zeros(here, len(samplers), decoder.logits.shape[1], device="cuda")
        queries = [
            Query(s, position, [last[s]], choice=choice_of(sampler))
            for s, sampler in enumerate(samplers)
        ]
        tokens = decoder.run(queries, here, logits=kept)
        assert len(tokens) == here
        host = kept[:, :, :vocab].cpu()
        for r, row in enumerate(tokens):
            for s, sampler in enumerate(samplers):
                expected = sampler.pick(host[r, s], position + r + 1)
                assert row[s] == expected, f"sequence {s}, output {len(made) + r}"
                sampler.observe(expected)
        made += tokens
        last = made[-1]
    return made


@pytest.mark.parametrize("most_rounds", [1, 64, NUM_ROUNDS])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_tokens_are_the_definitions(params: SamplingParams, most_rounds: int) -> None:
    made = decode(samplers_of(params), most_rounds)
    assert made == decode(samplers_of(params), 64), "however many rounds a launch has"


@pytest.mark.parametrize("pair", [
    ("greedy", "filters"), ("all", "greedy"), ("penalties", "all"), ("temperature", "top_p"),
], ids="-".join)  # fmt: skip
def test_queries_choose_each_in_its_own_way(pair: tuple[str, str]) -> None:
    requests = [PARAMS.get(name, SamplingParams()) for name in pair]
    both = decode(samplers_of(*requests), 64)
    for s, params in enumerate(requests):
        assert [row[s] for row in both] == [row[0] for row in decode(samplers_of(params), 64)]


def test_positions_of_one_sequence_side_by_side() -> None:
    decoder, vocab = model().decoder, engine().config.vocab_size
    ids = prompt_ids()[: len(prompt_ids()) // 4 * 4]
    (sampler,) = samplers_of(PARAMS["filters"])
    kept = torch.zeros(len(ids) // 4, 4, decoder.logits.shape[1], device="cuda")
    queries = [Query(0, c, ids[c::4], stride=4, choice=choice_of(sampler)) for c in range(4)]
    tokens = decoder.run(queries, len(kept), logits=kept)
    for position, logits in enumerate(kept.flatten(0, 1)[:, :vocab].cpu()):
        assert tokens[position // 4][position % 4] == sampler.pick(logits, position + 1)


def test_scores_of_which_none_is_finite_end_the_launch() -> None:
    decoder, vocab = model().decoder, engine().config.vocab_size
    (sampler,) = samplers_of(SamplingParams(temperature=1.0, seed=1, min_tokens=9))
    everything = Choice(sampler.params, sampler.counts, frozenset(range(vocab)))
    ((word,),) = decoder.run([Query(0, 0, [5], choice=everything)], 50)
    assert bad_score(word) == -math.inf
    plain = decoder.run([Query(0, 0, [5])], 5)
    assert len(plain) == 5, "the next launch is as ever"


def answer(params: SamplingParams) -> Completion:
    *_, end = engine().generate(PROMPT, params)
    assert isinstance(end, Completion)
    return end


@pytest.mark.parametrize("name", ["filters", "all"])
def test_a_seed_gives_one_text(name: str) -> None:
    values = {**PARAMS[name].describe(), "max_tokens": 120, "ignore_eos": True}
    values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
    first = answer(SamplingParams(**values))
    assert answer(SamplingParams(**values)).token_ids == first.token_ids
    assert answer(SamplingParams(**values | {"seed": 77})).token_ids != first.token_ids


def test_stop_tokens_end_a_sampled_launch() -> None:
    free = answer(SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)).token_ids
    many = frozenset({free[20], *range(100, 100 + 2 * MAX_STOPS)})
    for stops in (frozenset({free[20]}), many):
        end = answer(SamplingParams(
            temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, stop_token_ids=stops
        ))  # fmt: skip
        stop = min(i for i, token_id in enumerate(free) if token_id in stops)
        assert end.finish_reason == "stop"
        assert end.token_ids == free[: stop + 1]


def test_a_sampled_launch_is_cancelled_and_the_next_request_runs() -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=1.0, seed=1, top_p=0.9)
    cancel, seen = Cancel(), 0
    for event in engine().generate(PROMPT, params, cancel):
        if isinstance(event, Chunk):
            seen += len(event.token_ids)
            if seen >= 10:
                cancel()
        else:
            assert event.finish_reason == "cancelled"
            assert event.timings.new_tokens < 4000
    assert len(answer(SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5
