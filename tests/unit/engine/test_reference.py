"""Sequences on the reference beside each other: bounds in time change who waits, and no bit."""

import random
import time
from dataclasses import replace
from itertools import count, pairwise

import pytest
import torch

from soloist.bench.others import QUIET_CORES, others_counted
from soloist.device import CoreWatch, usable_cores
from soloist.engine import Completion, Engine, EngineConfig
from soloist.engine.executor import Picked
from soloist.engine.reference import ReferenceModel
from soloist.engine.request import Request
from soloist.model.config import Attention
from soloist.sampling import Sampler, SamplingParams
from timing import judged
from unit.prefill.models import model, random_weights
from unit.sampling.constraints import Steps

VOCAB = 61
CONFIG = model(
    *[Attention(4, 2, 16), replace(Attention(4, 2, 16), window=50)] * 2, context_tokens=4000
)


@pytest.fixture(params=["one part a time", "unbounded"])
def bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    bound_s = 0.0 if request.param == "one part a time" else 60.0
    monkeypatch.setattr(ReferenceModel, "_part_s", bound_s)
    return bound_s


def executor(*, keeps_prefixes: bool = False, sequences: int = 3) -> ReferenceModel:
    torch.set_num_threads(1)  # engines that other tests loaded in this process set more
    return ReferenceModel(
        CONFIG, random_weights(CONFIG), 4000, sequences, 32, keeps_prefixes=keeps_prefixes
    )


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def opened(one: ReferenceModel, prompt: list[int], most: int = 8, **more: object) -> Request:
    steps = more.pop("steps", None)
    sampler = Sampler(SamplingParams(max_tokens=most, ignore_eos=True), VOCAB, prompt, (), steps)  # type: ignore[arg-type]
    request = Request(prompt, sampler, **more)  # type: ignore[arg-type]
    assert one.open(request)
    return request


def read(one: ReferenceModel, running: Request) -> Picked | None:
    picked = None
    while not running.is_read:
        picked = one.read(running)
    return picked


def answer(one: ReferenceModel, running: Request) -> list[int]:
    read(one, running)
    while not running.has_all_tokens:
        for _ in one.rounds([running], running.num_wanted):
            pass
    one.free(running)
    return running.sampler.output_ids


def keys(one: ReferenceModel, request: Request, stop: int) -> list[torch.Tensor]:
    cache = one._open[request].cache
    return [x.clone() for i in range(cache.num_blocks) for x in cache.view(i, 0, stop)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_prompts_in_turns_have_the_bits_of_each_alone(bounds: float) -> None:
    prompts = [tokens(count, seed) for seed, count in enumerate((300, 77, 33))]
    wanted = []
    for prompt in prompts:
        one = executor()
        running = opened(one, prompt)
        read(one, running)
        wanted.append((keys(one, running, len(prompt)), answer(one, running)))
    one = executor()
    running = [opened(one, prompt) for prompt in prompts]
    num_reads = 0
    while not all(r.is_read for r in running):
        for i, r in enumerate(running):
            if not r.is_read:
                one.read(r)
                num_reads += 1
                if r.is_read:
                    assert same(keys(one, r, len(prompts[i])), wanted[i][0])
        decoding = [r for r in running if r.is_read and not r.has_all_tokens]
        for _ in one.rounds(decoding, 1) if decoding else ():
            pass  # steps between the parts of passes
    if not bounds:
        # Each layer has two blocks, and a pass ends with its logits or nothing.
        parts = (2 * CONFIG.num_layers + 1) * sum(-(-len(p) // 32) for p in prompts)
        assert num_reads == parts
    assert [answer(one, r) for r in running] == [made for _, made in wanted]
    one.check()


@pytest.mark.usefixtures("bounds")
def test_a_kept_prompt_has_the_bits_of_a_new_one() -> None:
    stem = tokens(200, 1)
    one = executor(keeps_prefixes=True)
    answer(one, opened(one, stem))
    for shared in (150, 199, 64, 5):
        prompt = stem[:shared] + tokens(60, shared)
        hit, fresh = opened(one, prompt), executor()
        miss = opened(fresh, prompt)
        assert hit.num_cached == shared // 32 * 32
        read(one, hit)
        read(fresh, miss)
        assert same(keys(one, hit, len(prompt)), keys(fresh, miss, len(prompt)))
        assert answer(one, hit) == answer(fresh, miss)
        one.check()


@pytest.mark.usefixtures("bounds")
def test_scores_of_a_prompt_do_not_depend_on_what_runs_beside_it() -> None:
    prompt = tokens(150, 2)
    alone, one = executor(), executor()
    wanted = opened(alone, prompt, scores="both", top_logprobs=2)
    first = read(alone, wanted)
    other = opened(one, tokens(90, 3), most=200)
    read(one, other)
    scored = opened(one, prompt, scores="both", top_logprobs=2)
    while not scored.is_read:
        picked = one.read(scored)
        next(iter(one.rounds([other], 1)))
    assert scored.prompt_scores == wanted.prompt_scores
    assert len(scored.prompt_scores or ()) == len(prompt) - 1
    assert picked == first


def test_closing_in_the_middle_of_a_pass_gives_all_back(bounds: float) -> None:
    one = executor(keeps_prefixes=True)
    stem = tokens(300, 4)
    halfway = opened(one, stem)
    one.read(halfway)
    assert halfway.is_read == (bounds > 0)
    one.free(halfway)
    one.check()
    assert one.num_pages_free == one.num_pages
    fresh = executor()
    assert answer(one, opened(one, stem)) == answer(fresh, opened(fresh, stem))


def test_forced_tokens_of_one_do_not_stop_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [{3, 4}, *({i % VOCAB} for i in range(400)), {5, 6}, {7, 8, 9}]
    prompt = tokens(20, 5)

    def made(bound_s: float) -> tuple[list[int], int]:
        monkeypatch.setattr(ReferenceModel, "_part_s", bound_s)
        one = executor()
        forced = opened(one, prompt, most=len(sets), steps=Steps(VOCAB, sets))
        other = opened(one, tokens(30, 6), most=600)
        for running in (forced, other):
            read(one, running)
        assert forced.num_behind == 400
        num_waits = 0
        while not forced.has_all_tokens:
            for first, second in one.rounds([forced, other], 8):
                assert isinstance(second, Picked), "a token in every round"
                num_waits += first is None
        return forced.sampler.output_ids, num_waits

    at_once, waited = made(60.0)
    in_parts, waits = made(0.0)
    assert in_parts == at_once
    assert waited == 0
    # 401 tokens in 13 passes; the last part brings a token.
    assert waits == 13 * (2 * CONFIG.num_layers + 1) - 1


def test_parts_of_prompts_are_shorter_where_rounds_are_slow() -> None:
    one = executor()
    opened(one, tokens(20, 8))
    assert one._part_s == 0.25
    opened(one, tokens(20, 9))
    for round_s, part_s in ((0.0, 0.02), (0.05, 0.01), (3.0, 0.005)):
        one._round_s = round_s
        assert one._part_s == pytest.approx(part_s)


def test_opening_a_sequence_makes_no_table_and_fills_no_memory() -> None:
    """Of a long context both take a while, in which nobody else gets a token."""
    one = executor()
    (table,) = one.reference._rotaries
    for length in (10, 3000):
        running = opened(one, tokens(length, 7))
        assert one.reference._rotaries == (table,)
        one.free(running)


# --- the clock ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etude() -> Engine:
    """With a thread for each core, as a server has it."""
    before = torch.get_num_threads()
    engine = Engine.load(EngineConfig("etude", "cpu", sequences=2, keeps_prefixes=True))
    yield engine
    torch.set_num_threads(before)


def require_quiet(cores: int) -> None:
    if usable_cores() < cores:
        pytest.skip(f"needs {cores} cores")
    watch = CoreWatch(0.4)
    time.sleep(0.5)
    if (others := watch.others()) > 2 * QUIET_CORES:
        pytest.skip(f"other processes use {others:.2f} cores")


def sampler_of(prompt: list[int], most: int) -> Sampler:
    return Sampler(SamplingParams(max_tokens=most, ignore_eos=True), 8192, prompt, ())


@pytest.mark.timed
def test_a_stream_beside_a_long_prompt_is_never_held_up_for_long(etude: Engine) -> None:
    require_quiet(2)
    seeds = count()

    def worst_gap_s() -> float:
        rng, one = random.Random(next(seeds)), etude.model
        short, long = ([rng.randrange(1, 8000) for _ in range(n)] for n in (20, 3000))
        stream = Request(short, sampler_of(short, 2000))
        assert one.open(stream)
        while one.read(stream) is None:
            pass
        beside = Request(long, sampler_of(long, 4))
        assert one.open(beside)
        times = [time.perf_counter()]
        while not beside.is_read:
            one.read(beside)
            for _ in one.rounds([stream], 8):
                times.append(time.perf_counter())
        for running in (stream, beside):
            one.free(running)
        return max(b - a for a, b in pairwise(times))

    def check(gap_s: float) -> None:
        assert gap_s < 0.1

    judged(worst_gap_s, check, 3)


@pytest.mark.timed
def test_one_busy_process_does_not_stop_the_others_cores(etude: Engine) -> None:
    """Threads that spin at barriers made 0.05 to 0.35 of the speed alone."""
    require_quiet(2)
    prompt = [i % 8000 for i in range(1, 1101)]

    def speeds() -> tuple[float, float]:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        (done,) = [e for e in etude.generate(prompt[:40], params) if isinstance(e, Completion)]
        assert done.timings.decode_tokens_per_s is not None
        # Another beginning each time, so that nothing of it is cached.
        fresh = random.sample(prompt, len(prompt))
        (read,) = [
            e
            for e in etude.generate(fresh, replace(params, max_tokens=1))
            if isinstance(e, Completion)
        ]
        return done.timings.decode_tokens_per_s, len(fresh) / read.timings.ttft_s

    def median_of(tries: int) -> list[float]:
        made = [speeds() for _ in range(tries)]
        return [sorted(values)[tries // 2] for values in zip(*made, strict=True)]

    def kept() -> list[float]:
        """Of both speeds, beside one busy process."""
        found = []
        for _ in range(3):
            alone = median_of(3)
            with others_counted(1):
                busy = median_of(3)
            found.append([b / a for a, b in zip(alone, busy, strict=True)])
        return [sorted(values)[1] for values in zip(*found, strict=True)]

    def check(kept: list[float]) -> None:
        decode, reading = kept
        assert decode > 0.7
        assert reading > 0.35  # one core is all that is due beside another group

    judged(kept, check, 1)
