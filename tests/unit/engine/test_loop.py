"""Requests side by side: whatever joins, leaves and is cancelled, answers are those alone."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from soloist.engine import Chunk, Completion, Engine, EngineConfig, Failure, Request
from soloist.engine.executor import Executor
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.loop import EngineLoop, Progress
from soloist.errors import (
    BadLogits,
    EngineStopped,
    LaunchError,
    QueueFull,
    RequestError,
    ShuttingDown,
)
from soloist.kv.memory import kv_bytes_seen
from soloist.megakernel.sampling_header import NO_TOKEN
from soloist.sampling import Sampler, SamplingParams
from timing import judged
from unit.engine.fakes import VOCAB, Cache, FakeDecoder, FakeHost, FakePrefill, opened
from unit.engine.test_kernel import EOS, PARAMS, expected, prompt_of
from unit.engine.test_traffic import TRAFFIC

WAIT_S = 20


class Words:
    """A tokenizer whose tokens are letters."""

    eos_ids = frozenset(EOS)
    special_ids = frozenset(EOS)

    def token(self, token_id: int) -> str:
        return chr(ord("A") + token_id)

    def detokenizer(self):
        return self

    def push(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def finish(self) -> str:
        return ""


class Slow(FakeDecoder):
    """Lets other threads in between two rounds."""

    pause_s = 0.0

    def tokens(self):
        for chosen in super().tokens():
            yield chosen
            time.sleep(self.pause_s)


class Parts:
    def __init__(
        self, pages: int = 30, *, keeps_prefixes: bool = False, num_host_pages: int = 0, **options
    ):
        self.cache = Cache()
        self.decoder = Slow(self.cache, 16, sequences=4)
        self.prefill = FakePrefill(self.cache, 64)
        self.executor = KernelExecutor(
            self.decoder, self.prefill, pages, VOCAB, 64, keeps_prefixes=keeps_prefixes,
            host=FakeHost(self.cache, num_host_pages),
        )  # fmt: skip
        self.num_pages = pages
        self.loop = EngineLoop(self.executor, Words(), VOCAB, **options)

    @property
    def num_free_pages(self) -> int:
        return self.executor.allocator.pages.num_free


def ended(ticket: Request) -> tuple[str, list[int], Completion | Failure]:
    text, ids = "", []
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for event in ticket.take():
            if isinstance(event, Chunk):
                text += event.text
                ids += event.token_ids
            else:
                assert not ticket.take(), "nothing comes after the end"
                return text, ids, event
        time.sleep(0.0005)
    raise AssertionError("the request does not end")


def all_of(ticket: Request) -> tuple[Completion, list[Chunk]]:
    """The end and all that came before."""
    events: list[Chunk | Completion | Failure] = []

    def has_ended() -> bool:
        events.extend(ticket.take())
        return bool(events) and not isinstance(events[-1], Chunk)

    wait_for(has_ended)
    end = events.pop()
    assert isinstance(end, Completion)
    return end, [event for event in events if isinstance(event, Chunk)]


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.0005)


@pytest.mark.parametrize("seed", range(6))
def test_requests_side_by_side_are_those_alone(parts, seed: int) -> None:
    rng = random.Random(seed)
    p = parts(pages=rng.choice([10, 14, 30]))
    p.decoder.pause_s = rng.choice([0, 0.0005])
    asked = []
    for number in range(14):
        prompt = prompt_of(rng.choice([1, 7, 20, 30, 64, 100, 200]), seed=100 * seed + number)
        params = rng.choice(list(PARAMS.values()))
        asked.append((prompt, params, p.loop.submit(prompt, params)))
        time.sleep(rng.choice([0, 0, 0.002]))
    for prompt, params, ticket in asked:
        text, ids, end = ended(ticket)
        assert ids == expected(prompt, params)
        assert isinstance(end, Completion)
        assert list(end.token_ids) == ids
        assert end.text == text
        assert end.timings.prompt_tokens == len(prompt)
        assert 0 <= end.timings.queue_s <= end.timings.ttft_s <= end.timings.total_s
    assert max(len(x.queries) for x in p.decoder.launches) > 1, "they shared launches"


@pytest.mark.parametrize("seed", range(4))
def test_random_cancels_leave_nothing_behind(parts, seed: int) -> None:
    rng = random.Random(seed)
    p = parts(pages=12)
    p.decoder.pause_s = 0.0002
    tickets = []
    for number in range(30):
        prompt = prompt_of(rng.choice([5, 30, 150]), seed=number)
        params = SamplingParams(max_tokens=rng.choice([1, 5, 300]), ignore_eos=True)
        tickets.append((prompt, params, p.loop.submit(prompt, params)))
        if rng.random() < 0.6:
            rng.choice(tickets)[2].cancel()
    for prompt, params, ticket in tickets:
        if rng.random() < 0.7:
            ticket.cancel()
        _, ids, end = ended(ticket)
        assert isinstance(end, Completion)
        assert end.finish_reason == ("length" if len(ids) == params.max_tokens else "cancelled")
        assert ids == expected(prompt, params)[: len(ids)]
    wait_for(lambda: p.loop.load.num_running == p.loop.load.num_waiting == 0)


def test_a_thousand_disconnects_leave_every_page_free(parts) -> None:
    rng = random.Random(0)
    p = parts(pages=12, most_waiting=20, keeps_prefixes=True, num_host_pages=6)
    stems = [prompt_of(200, seed=n) for n in range(3)]
    listening: list[tuple[Request, list[int], SamplingParams]] = []
    num_ended = 0

    def end(one: tuple[Request, list[int], SamplingParams]) -> None:
        ticket, prompt, params = one
        _, ids, completion = ended(ticket)
        assert isinstance(completion, Completion)
        assert completion.finish_reason == (
            "length" if len(ids) == params.max_tokens else "cancelled"
        )
        if rng.random() < 0.02:
            assert ids == expected(prompt, params)[: len(ids)]

    while num_ended < 1000:
        prompt = rng.choice(stems)[: rng.choice([3, 64, 70, 130, 200])] + [num_ended % VOCAB]  # noqa: RUF005 - a slice
        params = SamplingParams(max_tokens=rng.choice([1, 5, 400]), ignore_eos=True)
        try:
            listening.append((p.loop.submit(prompt, params), prompt, params))
        except QueueFull:
            gone = listening.pop(rng.randrange(len(listening)))
            gone[0].cancel()
            end(gone)
            num_ended += 1
        if listening and rng.random() < 0.5:
            rng.choice(listening)[0].cancel()
        if rng.random() < 0.05:
            time.sleep(0.001)
    for one in listening:
        one[0].cancel()
        end(one)
    wait_for(lambda: p.loop.load.num_running == p.loop.load.num_waiting == 0)
    assert not p.executor.allocator._open
    assert p.executor.tiers.num_available == 12, "cached pages are nobody's"
    assert p.loop.cached.fetched > 0


def test_a_cancelled_request_makes_at_most_two_more_tokens(parts) -> None:
    p = parts()
    p.decoder.pause_s = 0.02
    ticket = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=500, ignore_eos=True))
    wait_for(lambda: p.decoder.num_rounds > 3)
    before = p.decoder.num_rounds
    ticket.cancel()
    _, _, end = ended(ticket)
    assert isinstance(end, Completion)
    assert end.finish_reason == "cancelled"
    assert p.decoder.num_rounds <= before + 2


def test_a_stream_pauses_for_one_chunk_of_anothers_prompt(parts) -> None:
    p = parts()
    p.decoder.pause_s = 0.0005
    first = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=400, ignore_eos=True))
    wait_for(lambda: p.decoder.num_rounds > 3)
    long_prompt = prompt_of(300, seed=1)
    rounds_at_chunk: list[int] = []
    run = p.prefill.run

    def counted(*args, **named):
        rounds_at_chunk.append(p.decoder.num_rounds)
        return run(*args, **named)

    p.prefill.run = counted
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert ended(p.loop.submit(long_prompt, params))[1] == expected(long_prompt, params)
    assert p.prefill.chunks[1:] == [64, 64, 64, 64, 44]
    steps = [b - a for a, b in pairwise(rounds_at_chunk)]
    assert all(step == 8 for step in steps), "a burst of rounds between two chunks"
    first.cancel()
    ended(first)


LONG = {
    "greedy": SamplingParams(max_tokens=500, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=480, temperature=1.0, seed=5, ignore_eos=True),
    "penalties": SamplingParams(max_tokens=520, repetition_penalty=1.5, ignore_eos=True),
    "banned": SamplingParams(max_tokens=470, min_tokens=460, stop_token_ids=frozenset(range(30))),
}


@contextmanager
def all_at_once(p: Parts) -> Iterator[None]:
    """Let nobody join until all have been submitted."""
    all_asked, open_one = threading.Event(), p.executor.open

    def waited(*args, **named):
        assert all_asked.wait(WAIT_S)
        return open_one(*args, **named)

    p.executor.open = waited
    yield
    all_asked.set()


@pytest.mark.parametrize("length", [7, 100])
@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_who_came_last_is_preempted_and_goes_on(parts, length: int, keeps_prefixes: bool) -> None:
    p = parts(pages=12, keeps_prefixes=keeps_prefixes)
    asked = [(prompt_of(length, seed=n), params) for n, params in enumerate(LONG.values())]
    with all_at_once(p):
        tickets = [
            p.loop.submit(*one, top_logprobs=None if n else 1) for n, one in enumerate(asked)
        ]
    for ticket, (prompt, params) in zip(tickets, asked, strict=True):
        assert ended(ticket)[1] == expected(prompt, params)
    assert p.loop.load.num_preemptions >= 2, "each takes eight to ten pages in the end"
    assert max(len(x.queries) for x in p.decoder.launches) > 1, "and fewer at first"


def test_a_preempted_request_can_be_cancelled(parts) -> None:
    p = parts(pages=10)
    preempt = p.executor.preempt

    def cancelled(running: Request) -> None:
        preempt(running)
        tickets[1].cancel()

    p.executor.preempt = cancelled
    asked = [(prompt_of(30, seed=n), LONG["greedy"]) for n in range(3)]
    with all_at_once(p):
        tickets = [p.loop.submit(*one) for one in asked]
    _, ids, end = ended(tickets[1])
    assert isinstance(end, Completion)
    assert end.finish_reason == "cancelled"
    assert 200 < len(ids) < 500
    assert ids == expected(*asked[1])[: len(ids)]
    for n in (0, 2):
        assert ended(tickets[n])[1] == expected(*asked[n])


def test_a_huge_answer_that_is_not_made_keeps_nobody_out(parts) -> None:
    p = parts(pages=12)
    p.decoder.pause_s = 0.02
    first = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=600, ignore_eos=True))
    wait_for(lambda: p.decoder.num_rounds > 3)
    prompt = prompt_of(30, seed=1)
    params = SamplingParams(max_tokens=600, stop_token_ids=frozenset(range(50)))
    assert ended(p.loop.submit(prompt, params))[1] == expected(prompt, params)
    assert all(isinstance(event, Chunk) for event in first.take()), "the first still runs"
    first.cancel()


def test_stop_strings_end_one_request_and_not_the_others(parts) -> None:
    p, params = parts(), SamplingParams(max_tokens=200, ignore_eos=True)
    prompts = [prompt_of(30, seed=n) for n in range(3)]
    letters = ["".join(Words().token(i) for i in expected(x, params)) for x in prompts]
    stop = letters[1][50:53]
    tickets = [
        p.loop.submit(prompts[0], params),
        p.loop.submit(prompts[1], SamplingParams(max_tokens=200, ignore_eos=True, stop=(stop,))),
        p.loop.submit(prompts[2], params),
    ]
    ends = [ended(t) for t in tickets]
    assert ends[1][2].finish_reason == "stop"
    assert ends[1][2].stop == stop
    assert ends[1][0] == letters[1][: letters[1].index(stop)]
    assert [e[1] for e in (ends[0], ends[2])] == [expected(prompts[n], params) for n in (0, 2)]


def test_log_probabilities_come_with_each_token_and_change_none(parts) -> None:
    p, prompt, params = parts(), prompt_of(30), SamplingParams(max_tokens=12, ignore_eos=True)
    ticket = p.loop.submit(prompt, params, top_logprobs=2)
    other = p.loop.submit(prompt, params)
    chunks: list[Chunk] = []
    wait_for(lambda: chunks.extend(ticket.take()) or isinstance(chunks and chunks[-1], Completion))
    chunks.pop()
    ids = [i for c in chunks for i in c.token_ids]
    assert ids == ended(other)[1] == expected(prompt, params)
    for chunk in chunks:
        (shown,) = chunk.logprobs
        assert shown.top[0] == (chunk.token_ids[0], shown.chosen), "greedy takes the likeliest"
        assert len(shown.top) == 2
        assert shown.top[1][1] <= shown.chosen < 0


def test_the_queue_is_bounded(parts) -> None:
    p = parts(most_waiting=2)
    p.decoder.pause_s = 0.001
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    tickets = [p.loop.submit(prompt_of(5, seed=n), params) for n in range(6)]
    with pytest.raises(QueueFull, match="2 waiting requests") as caught:
        p.loop.submit(prompt_of(5), params)
    assert caught.value.retry_s >= 1
    for ticket in tickets:
        ticket.cancel()
        ended(ticket)
    ended(p.loop.submit(prompt_of(5), SamplingParams(max_tokens=1)))


def test_progress_is_the_age_of_what_moved_last_and_nobody_waits_for_the_device(parts) -> None:
    p, go = parts(), threading.Event()
    assert p.loop.progress == Progress(0.0, "waiting for a request")
    time.sleep(1)  # what comes into an idle loop has not waited for as long
    run = p.prefill.run

    def held_up(*args, **named):
        go.wait(WAIT_S)
        return run(*args, **named)

    p.prefill.run = held_up
    ticket = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=3000, ignore_eos=True))
    assert p.loop.progress.age_s < 0.9
    wait_for(lambda: p.loop.progress.age_s > 1)
    asked = time.perf_counter()
    stuck, load, pages = p.loop.progress, p.loop.load, p.loop.pages
    ticket.cancel()
    with pytest.raises(RequestError):
        p.loop.submit([VOCAB], SamplingParams(max_tokens=1))
    p.loop.submit(prompt_of(5), SamplingParams(max_tokens=1))
    assert time.perf_counter() - asked < WAIT_S / 4, "no lock is held while the device works"
    assert (stuck.step, load.num_running, pages.total) == ("reading a prompt", 1, 30)
    assert pages.free < 30
    go.set()
    ended(ticket)
    wait_for(lambda: p.loop.progress.age_s == 0.0)
    wait_for(lambda: p.loop.pages.free == 30)


def test_figures_may_be_asked_for_at_any_moment(parts) -> None:
    p = parts(pages=10, keeps_prefixes=True, num_host_pages=9)
    is_over, wrong = threading.Event(), []

    def ask() -> None:
        while not is_over.is_set():
            try:
                pages, cached, progress = p.loop.pages, p.loop.cached, p.loop.progress
                assert 0 <= pages.free <= pages.total == 10
                assert cached.on_device >= 0
                assert 0 <= progress.age_s < 5
                assert 0 <= p.loop.load.num_running <= 4
            except Exception as error:  # noqa: BLE001 - told below
                wrong.append(error)
                return

    asking = threading.Thread(target=ask)
    asking.start()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for number in range(60):
        prompt = prompt_of(300, seed=number % 4)[: 100 + 50 * (number % 5)]
        ended(p.loop.submit(prompt, params))
    is_over.set()
    asking.join(WAIT_S)
    assert not wrong
    assert p.loop.cached.fetched, "chunks went to the host and came back"


def test_every_round_is_progress(parts) -> None:
    p = parts()
    p.decoder.pause_s = 0.02
    ticket = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=400, ignore_eos=True))
    wait_for(lambda: p.decoder.num_rounds > 1)
    while p.decoder.num_rounds < 15:  # a launch has 16
        assert p.loop.progress.age_s < 0.2
        assert p.loop.progress.step == "decoding"
        time.sleep(0.001)
    ticket.cancel()


def test_who_leaves_is_not_waited_for_under_the_lock(parts) -> None:
    p, leaves, go = parts(), threading.Event(), threading.Event()
    p.decoder.pause_s = 0.001
    close = p.executor.free

    def held_up(running: Request) -> None:
        leaves.set()
        go.wait(WAIT_S)
        close(running)

    p.executor.free = held_up
    ticket = p.loop.submit(prompt_of(30), SamplingParams(max_tokens=400, ignore_eos=True))
    wait_for(lambda: p.decoder.num_rounds > 3)
    ticket.cancel()
    assert leaves.wait(WAIT_S)
    asked = time.perf_counter()
    other = p.loop.submit(prompt_of(5), SamplingParams(max_tokens=1))
    assert time.perf_counter() - asked < 1
    assert p.loop.load.num_running == 1, "it has its column until its pages are free"
    go.set()
    ended(other)


def test_closing_lets_requests_finish_or_cuts_them(parts) -> None:
    p = parts()
    p.decoder.pause_s = 0.001
    short = p.loop.submit(prompt_of(5), SamplingParams(max_tokens=20, ignore_eos=True))
    long = p.loop.submit(prompt_of(6), SamplingParams(max_tokens=500, ignore_eos=True))
    closer = threading.Thread(target=p.loop.close, args=[0.15])
    closer.start()
    wait_for(lambda: p.loop._is_closing)
    with pytest.raises(ShuttingDown):
        p.loop.submit(prompt_of(5), SamplingParams(max_tokens=1))
    assert ended(short)[2].finish_reason == "length"
    assert ended(long)[2].finish_reason == "cancelled"
    closer.join(WAIT_S)
    assert not p.loop._thread.is_alive()
    with pytest.raises(ShuttingDown):
        p.loop.submit(prompt_of(5), SamplingParams(max_tokens=1))


def test_a_device_that_fails_fails_everybody_and_says_so(parts) -> None:
    failures = []
    p = parts(on_failure=failures.append)
    p.decoder.pause_s = 0.001
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    tickets = [p.loop.submit(prompt_of(5, seed=n), params) for n in range(6)]
    wait_for(lambda: p.decoder.num_rounds > 3)
    p.decoder.fault = LaunchError("the decode kernel", "it broke")
    for ticket in tickets:
        end = ended(ticket)[2]
        assert isinstance(end, Failure)
        assert "it broke" in end.error.message
    wait_for(lambda: bool(failures))
    with pytest.raises(EngineStopped, match="it broke"):
        p.loop.submit(prompt_of(5), params)
    assert not p.loop._core.requests
    assert p.loop.progress.age_s == 0.0


def test_scores_without_a_best_one_fail_one_request(parts) -> None:
    p = parts()
    p.decoder.pause_s = 0.001
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    ticket = p.loop.submit(prompt_of(30), params)
    wait_for(lambda: p.decoder.num_rounds > 3)
    p.decoder.forced_choice = NO_TOKEN["NAN"][0]
    end = ended(ticket)[2]
    assert isinstance(end, Failure)
    assert isinstance(end.error, BadLogits)
    p.decoder.forced_choice = None
    prompt = prompt_of(31)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert ended(p.loop.submit(prompt, params))[1] == expected(prompt, params)


def test_listeners_hear_of_the_first_token_and_the_end_and_seldom_between(parts) -> None:
    heard: list[int] = []
    p = parts(flush_s=3600)
    p.decoder.pause_s = 0.0005
    ticket = p.loop.submit(
        prompt_of(30),
        SamplingParams(max_tokens=100, ignore_eos=True),
        listen=lambda: heard.append(p.decoder.num_rounds),
    )
    ended(ticket)
    # In between only where a launch (of 16 rounds here) ends and the next token may take a while.
    assert heard[0] == 0
    assert heard[-1] == 99
    assert all(at % 16 == 0 for at in heard[:-1])


def test_bytes_of_decoding_count_every_round_once(parts) -> None:
    p = parts(traffic=TRAFFIC)
    prompt = prompt_of(30)
    alone = ended(p.loop.submit(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))[2]
    # The first token comes from the prompt; the round after it sees 31 positions.
    seen = [kv_bytes_seen(TRAFFIC.config, TRAFFIC.kv, 31 + n) for n in range(39)]
    assert alone.timings.decode_bytes == 39 * TRAFFIC.weights_bytes + sum(seen)
    p.decoder.pause_s = 0.001
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    both = [ended(t)[2].timings for t in [p.loop.submit(prompt, params) for _ in range(2)]]
    # Weights are read once for both, caches for each.
    cache = sum(kv_bytes_seen(TRAFFIC.config, TRAFFIC.kv, 31 + n) for n in range(199))
    for t in both:
        assert 199 * TRAFFIC.weights_bytes + 1.5 * cache < t.decode_bytes
        assert t.decode_bytes <= 199 * TRAFFIC.weights_bytes + 2 * cache


# The reference ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etude() -> Engine:
    return Engine.load(EngineConfig("etude-draft", device="cpu", context_tokens=600, sequences=4))


def test_the_reference_takes_turns(etude: Engine) -> None:
    texts = ["def fibonacci(n):\n", "class Point:\n", "import " * 150, "x = 1\n"]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=8, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=12, logit_bias={11: 3.0}, ignore_eos=True),
    ]
    alone = [list(etude.generate(t, p))[-1] for t, p in zip(texts, params, strict=True)]
    executor: Executor = etude.model
    loop = EngineLoop(executor, etude.tokenizer, etude.config.vocab_size)
    tickets = [
        loop.submit(etude.tokenizer.encode(t), p) for t, p in zip(texts, params, strict=True)
    ]
    for ticket, before in zip(tickets, alone, strict=True):
        text, ids, end = ended(ticket)
        assert tuple(ids) == before.token_ids
        assert text == before.text
        assert end.finish_reason == before.finish_reason
    loop.close()


def test_requests_wait_for_pages(etude: Engine) -> None:
    prompt = etude.tokenizer.encode("def f(x):\n")
    params = SamplingParams(max_tokens=590 - len(prompt), ignore_eos=True)
    fitting = etude.resolved.kv_tokens // 590
    requests = [Request(prompt, sampler_of(etude, prompt, params)) for _ in range(fitting + 1)]
    executor = etude.model
    assert [executor.open(one) for one in requests] == [*[True] * fitting, False]
    executor.free(requests[0])
    assert executor.open(requests[-1])
    for one in requests[1:]:
        executor.free(one)


def sampler_of(engine: Engine, prompt: list[int], params: SamplingParams) -> Sampler:
    return Sampler(params, engine.config.vocab_size, prompt, engine.tokenizer.eos_ids)


# Kept prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_answers_to_prompts_that_begin_alike_are_those_alone(seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache()
    decoder, prefill = FakeDecoder(cache, 64, sequences=4), FakePrefill(cache, 2048)
    executor = KernelExecutor(decoder, prefill, 16, VOCAB, 64, keeps_prefixes=True)
    loop = EngineLoop(executor, Words(), VOCAB)
    stems = [prompt_of(n, seed=n) for n in (70, 130, 200)]
    stems.append(stems[2][:100] + stems[0])
    num_cached = 0
    for _ in range(6):
        asked = []
        for _ in range(5):
            stem = rng.choice(stems)
            prompt = stem[: rng.choice([64, 65, 128, 500])] + prompt_of(rng.choice([0, 1, 30]))
            params = SamplingParams(max_tokens=rng.choice([1, 40, 300]), ignore_eos=True)
            asked.append((prompt, params, loop.submit(prompt, params)))
            if rng.random() < 0.3:
                asked[-1][2].cancel()
        for prompt, params, ticket in asked:
            _, ids, end = ended(ticket)
            assert ids == expected(prompt, params)[: len(ids)]
            assert ticket.is_cancelled or len(ids) == params.max_tokens
            assert end.timings.cached_tokens % 64 == 0
            assert end.timings.cached_tokens < len(prompt)
            num_cached += end.timings.cached_tokens
    loop.close()
    assert num_cached > 500
    assert executor.allocator.pages.num_free + executor.cached.on_device // 64 == 16
    assert executor.tiers.num_available == 16, "nothing is in use any more"


def test_a_prompt_comes_back_from_the_host(parts, caplog) -> None:
    p = parts(pages=10, keeps_prefixes=True, num_host_pages=9)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    prompts = [prompt_of(400, seed=n) for n in range(2)]
    for prompt in prompts:
        assert ended(p.loop.submit(prompt, params))[1] == expected(prompt, params)
    assert p.loop.cached.on_host > 0
    p.prefill.chunks.clear()
    with caplog.at_level("INFO"):
        ticket = p.loop.submit(prompts[0], params)
        assert ended(ticket)[1] == expected(prompts[0], params)
    assert ticket.num_cached == 384
    assert p.prefill.chunks == [16], "nothing was read again that had been offloaded"
    assert p.loop.cached.fetched > 0
    assert "are fetched from the host's prefix cache" in caplog.text


def test_a_cached_prompt_is_not_read_again() -> None:
    cache = Cache()
    decoder, prefill = FakeDecoder(cache, 64, sequences=2), FakePrefill(cache, 2048)
    executor = KernelExecutor(decoder, prefill, 20, VOCAB, 64, keeps_prefixes=True)
    loop = EngineLoop(executor, Words(), VOCAB)
    prompt, params = prompt_of(200), SamplingParams(max_tokens=3, ignore_eos=True)
    ended(loop.submit(prompt, params))
    assert prefill.chunks == [64, 64, 64, 8]
    longer = prompt + prompt_of(70, seed=1)
    assert ended(loop.submit(longer, params))[1] == expected(longer, params)
    assert prefill.chunks[4:] == [64, 14]
    assert ended(loop.submit(longer[:128], params))[1] == expected(longer[:128], params)
    assert prefill.chunks[6:] == [64], "the last chunk is read again for its logits"
    loop.close()


def test_prompts_that_begin_alike_at_the_same_time_are_read_once(parts) -> None:
    p = parts(keeps_prefixes=True)
    shared = prompt_of(200)
    prompts = [shared + prompt_of(30, seed=n) for n in range(3)]
    samplers = [Sampler(SamplingParams(max_tokens=3), VOCAB, x, EOS) for x in prompts]
    running = [opened(p.executor, x, s) for x, s in zip(prompts, samplers, strict=True)]
    waiting = list(running)
    while waiting:
        sequence = waiting.pop(0)
        assert p.executor.reserve([sequence])
        if p.executor.read(sequence) is None:
            waiting.append(sequence)
    assert sorted(p.prefill.chunks) == [*([230 - 192] * 3), *([64] * 3)]
    assert [r.num_cached for r in running] == [0, 192, 192]
    for prompt, sampler, sequence in zip(prompts, samplers, running, strict=True):
        assert sampler.output_ids == expected(prompt, SamplingParams(max_tokens=1))
        p.executor.free(sequence)


def test_where_a_long_prompt_leaves_a_cached_one_is_logged(caplog) -> None:
    cache = Cache()
    decoder, prefill = FakeDecoder(cache, 64, sequences=2), FakePrefill(cache, 2048)
    executor = KernelExecutor(decoder, prefill, 20, VOCAB, 64, keeps_prefixes=True)
    tokenizer = Words()
    tokenizer.decode = lambda ids: "".join(map(tokenizer.token, ids))
    loop = EngineLoop(executor, tokenizer, VOCAB)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompt = prompt_of(400)
    other = [*prompt[:290], (prompt[290] + 1) % VOCAB, *prompt[291:]]
    ended(loop.submit(prompt, params))
    with caplog.at_level("INFO"):
        ended(loop.submit(other, params))
        assert "400 tokens differs from a cached one at token 290" in caplog.text
        assert tokenizer.decode(other[285:295]) not in caplog.text
    with caplog.at_level("DEBUG"):
        ended(loop.submit(other[:291] + other[200:300], params))
        ended(loop.submit([*prompt[:350], 1, 2, 3, *prompt[354:]], params))
        assert tokenizer.decode(prompt[345:355]) in caplog.text
        caplog.clear()
        ended(loop.submit([*prompt[:384], *other[:16]], params))
        assert "leaves" not in caplog.text, "nothing longer is cached"
        now = [*prompt[:318], *((i + 1) % VOCAB for i in prompt[318:340])]
        ended(loop.submit(now, params))
        assert "at token 318" in caplog.text
        assert repr(tokenizer.decode(prompt[306:330])) in caplog.text, "beyond the chunk, too"
        assert repr(tokenizer.decode(now[306:330])) in caplog.text
        ended(loop.submit([*prompt[:320], (prompt[320] + 1) % VOCAB, 0], params))
        assert "at token 320" in caplog.text, "where a chunk begins, too"
    loop.close()


@pytest.fixture(scope="module")
def keeping() -> Engine:
    asked = EngineConfig(
        "etude-draft", device="cpu", context_tokens=4400, sequences=2, keeps_prefixes=True
    )
    return Engine.load(asked)


def answered(loop: EngineLoop, ids: list[int], **changed) -> tuple[Completion, list[Chunk]]:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **changed)
    return all_of(loop.submit(ids, params, top_logprobs=4))


def shared_and_turns(engine: Engine) -> tuple[list[int], list[list[int]]]:
    """4,000 tokens of Python, and ways to go on."""
    text = "".join(f"def f_{i}(x):\n    return x + {i}\n" for i in range(400))
    shared = engine.tokenizer.encode(text)[:4000]
    return shared, [shared + engine.tokenizer.encode(f"x = {n}\n" * 3) for n in range(20)]


def test_hits_are_misses_bit_by_bit(keeping: Engine) -> None:
    loop = EngineLoop(keeping.model, keeping.tokenizer, keeping.config.vocab_size)
    shared, turns = shared_and_turns(keeping)
    answered(loop, shared[:300])
    first, told = answered(loop, turns[0])
    assert first.timings.cached_tokens == 256
    for _ in range(2):
        again, told_again = answered(loop, turns[0])
        assert again.timings.cached_tokens == 3968
        assert told_again == told, "tokens and log probabilities, to the last bit"
    assert answered(loop, turns[1])[0].timings.cached_tokens == 3968
    loop.close()
    assert keeping.model._num_free + keeping.model.cached.on_device == keeping.resolved.kv_tokens


@pytest.mark.timed
def test_a_second_turn_over_4000_tokens_begins_ten_times_as_soon() -> None:
    asked = EngineConfig(
        "etude", device="cpu", context_tokens=4400, sequences=2, keeps_prefixes=True
    )
    etude = Engine.load(asked)

    def ttft_s() -> tuple[float, list[float]]:
        loop = EngineLoop(etude.model, etude.tokenizer, etude.config.vocab_size)
        shared, turns = shared_and_turns(etude)
        answered(loop, shared[:300])  # warm
        first = answered(loop, turns[0])[0].timings
        assert first.cached_tokens == 256
        others = [answered(loop, turn)[0].timings for turn in turns[1:6]]
        loop.close()
        assert all(t.cached_tokens == 3968 for t in others)
        return first.ttft_s, [t.ttft_s for t in others]

    def check(ttft_s: tuple[float, list[float]]) -> None:
        first, others = ttft_s
        assert min(others) < first / 10

    judged(ttft_s, check, 1)


def test_cached_prompts_are_evicted_for_requests(keeping: Engine) -> None:
    loop = EngineLoop(keeping.model, keeping.tokenizer, keeping.config.vocab_size)
    rng = random.Random(0)
    for number in range(6):
        ids = [rng.randrange(100) for _ in range(3000)]
        end, _ = answered(loop, ids)
        assert len(end.token_ids) == 6, number
    whole = loop.submit(ids, SamplingParams(max_tokens=1400, ignore_eos=True))
    wait_for(lambda: bool(whole.take()))
    assert whole.num_cached == 2944, "the latest prompt was cached"
    whole.cancel()
    loop.close()
    assert keeping.model._num_free + keeping.model.cached.on_device == keeping.resolved.kv_tokens
