"""What goes wrong in a step fails whom it concerns; others keep their bits, and nothing is lost."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from soloist.engine import Completion, Engine, EngineConfig, Failure, Request
from soloist.engine.executor import is_lost
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.loop import EngineLoop
from soloist.engine.scheduler import Scheduler
from soloist.errors import (
    EngineStopped,
    KernelStuck,
    LaunchError,
    MemoryNotFreed,
    ShuttingDown,
    Stalled,
    StepFailed,
)
from soloist.sampling import Sampler, SamplingParams
from unit.engine.fakes import VOCAB, Cache, FakeHost, FakePrefill, opened
from unit.engine.test_kernel import expected, prompt_of
from unit.engine.test_loop import WAIT_S, Slow, Words, all_at_once, ended, wait_for

ENDLESS = SamplingParams(max_tokens=500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


class Broken(Exception):
    """What nobody foresaw."""


class Faults:
    """Raises in calls that it was put before, seldom and at random, or when it is told to.

    Attributes:
        num_raised: so far.
        due: the error of the next call that has this name.
    """

    def __init__(self, rng: random.Random, share: float = 0.0) -> None:
        self.rng, self.share = rng, share
        self.num_raised = 0
        self.due: dict[str, BaseException] = {}

    def stand_before(self, owner: object, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._checked(name, getattr(owner, name)))

    def check(self, name: str) -> None:
        if error := self.due.pop(name, None):
            raise error
        if self.rng.random() < self.share:
            self.num_raised += 1
            raise self.rng.choice([Broken(name), MemoryError(), RuntimeError("no memory")])

    def _checked(self, name: str, call: Callable) -> Callable:
        def checked(*args, **named):
            self.check(name)
            return call(*args, **named)

        return checked


class FaultyDecoder(Slow):
    """Fails between two rounds, too; the launch ends then."""

    faults: Faults

    def abandon(self) -> None:
        # Two words in memory, which cannot fail.
        due, share, self.faults.share = self.faults.due, self.faults.share, 0.0
        self.faults.due = {}
        super().abandon()
        self.faults.due, self.faults.share = due, share

    def tokens(self) -> Iterator[list[int]]:
        inner = super().tokens()
        try:
            for chosen in inner:
                yield chosen
                self.faults.check("tokens")
        finally:
            inner.close()
            self.is_running = False


class FaultyExecutor(KernelExecutor):
    faults: Faults

    def rounds(self, running: Sequence[Request], most: int):
        inner = super().rounds(running, most)
        try:
            for outcomes in inner:
                self.faults.check("round")
                yield outcomes
        finally:
            inner.close()
            self.faults.check("closing")


class Parts:
    """A loop over fakes, with faults at every call below it."""

    def __init__(
        self, pages: int = 30, *, share: float = 0.0, seed: int = 0, num_host_pages: int = 8,
        tokenizer: Words | None = None, **options,
    ) -> None:  # fmt: skip
        cache = Cache()
        self.faults = Faults(random.Random(seed), share)
        self.decoder, self.prefill = FaultyDecoder(cache, 16, sequences=4), FakePrefill(cache, 64)
        host = FakeHost(cache, num_host_pages)
        self.executor = FaultyExecutor(
            self.decoder, self.prefill, pages, VOCAB, 64, keeps_prefixes=True, host=host
        )
        self.decoder.faults = self.executor.faults = self.faults
        self.faults.stand_before(
            self.decoder, "write_pages", "start", "stop", "prepare_next", "start_next"
        )
        self.faults.stand_before(self.prefill, "run")
        self.faults.stand_before(host, "offload", "fetch", "join")
        names = ("open", "reserve", "preempt", "read", "free")
        self.faults.stand_before(self.executor, *(names[:-1] if share else names))
        self.failures: list[Exception] = []
        self.loop = EngineLoop(
            self.executor, tokenizer or Words(), VOCAB, on_failure=self.failures.append, **options
        )

    def require_sound(self) -> None:
        wait_for(lambda: self.loop.load.num_running == self.loop.load.num_waiting == 0)
        assert self.loop.failure is None
        self.executor.check()
        assert not self.executor.allocator._open
        assert self.loop.pages.free == self.loop.pages.total, "every page is back"
        self.faults.share = 0
        assert ended(self.loop.submit(prompt_of(70), SHORT))[1] == expected(prompt_of(70), SHORT)


@contextmanager
def parts(**options) -> Iterator[Parts]:
    made = Parts(**options)
    try:
        yield made
    finally:
        made.faults.share = 0
        assert made.loop.close(within_s=WAIT_S), "the thread ends, whatever happened"


def failed(ticket: Request) -> Failure:
    end = ended(ticket)[2]
    assert isinstance(end, Failure)
    return end


@pytest.mark.parametrize("seed", range(6))
def test_faults_anywhere_at_random_cost_only_requests_they_concern(seed: int) -> None:
    rng = random.Random(seed)
    stems = [prompt_of(200, seed=n) for n in range(3)]
    with parts(pages=rng.choice([7, 12, 30]), share=0.01, seed=seed) as p:
        asked: list[tuple[list[int], SamplingParams, Request]] = []
        num_failed = num_whole = 0
        for number in range(250):
            own = prompt_of(rng.choice([1, 5, 30]), seed=number)
            prompt = rng.choice(stems)[: rng.choice([0, 20, 64, 130, 200])] + own
            params = SamplingParams(max_tokens=rng.choice([1, 5, 40, 200]), ignore_eos=True)
            asked.append((prompt, params, p.loop.submit(prompt, params)))
            if rng.random() < 0.1:
                asked[-1][2].cancel()
            if len(asked) < 6 and number < 249:
                continue
            for prompt, params, ticket in asked:
                _, ids, end = ended(ticket)
                if isinstance(end, Failure):
                    num_failed += 1
                    assert isinstance(end.error, StepFailed)
                elif rng.random() < 0.3:
                    num_whole += 1
                    assert ids == expected(prompt, params)[: len(ids)]
                    assert ticket.is_cancelled or len(ids) == params.max_tokens
            asked.clear()
        assert p.faults.num_raised > 20
        assert num_failed > 10
        assert num_whole > 10
        p.require_sound()


@pytest.mark.parametrize("is_written", [False, True], ids=["nothing written", "all written"])
def test_a_page_table_whose_write_failed_is_written_again(is_written: bool) -> None:
    """The next sequence gets the same row and the same pages."""
    cache = Cache()
    decoder = Slow(cache, 16, sequences=4)
    executor = KernelExecutor(decoder, FakePrefill(cache, 64), 30, VOCAB, 64)
    write = decoder.write_pages

    def failing(*args) -> None:
        if is_written:
            write(*args)
        raise Broken

    def all_opened() -> list[Request]:
        prompts = [prompt_of(30, seed=n) for n in range(3)]
        running = [opened(executor, one, Sampler(SHORT, VOCAB, one)) for one in prompts]
        for one in running:
            while not one.is_read:
                executor.read(one)
        return running

    first = all_opened()
    allocations = [(a.row, list(a.pages)) for a in map(executor.allocation_of, first)]
    decoder.write_pages = failing
    with pytest.raises(Broken):
        list(executor.rounds(first, 4))
    decoder.write_pages = write
    for one in reversed(first):
        executor.free(one)
    again = all_opened()
    assert [(a.row, a.pages) for a in map(executor.allocation_of, again)] == allocations
    list(executor.rounds(again, 4))
    for slot, pages in allocations:
        assert decoder.page_tables[slot, : len(pages)].tolist() == pages


@pytest.mark.parametrize("name", ["open", "reserve", "read", "run", "join"])
@pytest.mark.parametrize("error", [Broken("secret"), MemoryError(), torch.OutOfMemoryError("CUDA")])
def test_a_prompt_that_cannot_be_read_fails_alone(name: str, error: Exception, caplog) -> None:
    with parts() as p:
        p.decoder.pause_s = 0.001
        other = p.loop.submit(prompt_of(30, seed=1), SamplingParams(max_tokens=60, ignore_eos=True))
        wait_for(lambda: p.decoder.num_rounds > 3)
        p.decoder.pause_s = 0.02  # nothing else is called within a launch
        p.faults.due[name] = error
        end = failed(p.loop.submit(prompt_of(70), SHORT))
        p.decoder.pause_s = 0
        assert isinstance(end.error, StepFailed)
        assert type(error).__name__ in end.error.message
        assert "secret" not in end.error.message, "others may have had a part in it"
        assert "Traceback" in caplog.text, "the operator learns more"
        _, ids, last = ended(other)
        assert isinstance(last, Completion)
        assert len(ids) == 60
        p.require_sound()


@pytest.mark.parametrize("name", ["start", "tokens", "round", "closing", "stop", "write_pages"])
def test_a_step_that_fails_half_way_ends_its_requests_and_no_others(name: str) -> None:
    with parts() as p:
        p.decoder.pause_s = 0.002
        tickets = [p.loop.submit(prompt_of(30, seed=n), ENDLESS) for n in range(3)]
        wait_for(lambda: p.loop.load.num_running == 3 and p.decoder.num_rounds > 30)
        p.faults.due[name] = Broken()
        waiting = [p.loop.submit(prompt_of(30, seed=n), SHORT) for n in (3, 4)]
        for ticket in tickets:
            assert isinstance(failed(ticket).error, StepFailed)
        for n, ticket in zip((3, 4), waiting, strict=True):
            _, ids, end = ended(ticket)
            # A page table is shown, or a launch started, for those who have just joined, too.
            assert ids == expected(prompt_of(30, seed=n), SHORT)[: len(ids)]
            assert isinstance(end, Completion) or name in (
                "write_pages",
                "start",
                "round",
                "tokens",
            )
        p.require_sound()


def test_who_cannot_be_preempted_fails_and_others_go_on() -> None:
    with parts(pages=10, num_host_pages=0) as p:
        p.faults.due["preempt"] = Broken()
        asked = [(prompt_of(30, seed=n), ENDLESS) for n in range(3)]
        ends = [ended(t) for t in [p.loop.submit(*one) for one in asked]]
        failures = [end for _, _, end in ends if isinstance(end, Failure)]
        assert [end.error.step for end in failures] == ["preempting a request"]
        for (prompt, params), (_, ids, end) in zip(asked, ends, strict=True):
            if isinstance(end, Completion):
                assert ids == expected(prompt, params)
        p.require_sound()


class Fragile(Words):
    """Of its streams the second one breaks at the fortieth token."""

    def __init__(self) -> None:
        self.num_streams = 0

    def detokenizer(self):
        self.num_streams += 1
        stream, number = Words(), self.num_streams
        pushed: list[str] = []

        def push(tokens: list[str]) -> str:
            pushed.extend(tokens)
            if number == 2 and len(pushed) >= 40:
                raise Broken
            return "".join(tokens)

        stream.push = push
        return stream


def test_a_column_that_fails_on_the_host_leaves_its_neighbours_alone() -> None:
    with parts(tokenizer=Fragile()) as p:
        p.decoder.pause_s = 0.001
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        with all_at_once(p):
            tickets = [p.loop.submit(prompt_of(30, seed=n), params) for n in range(3)]
        ends = [ended(ticket) for ticket in tickets]
        assert isinstance(ends[1][2], Failure)
        assert ends[1][2].error.step == "delivering an answer"
        for n in (0, 2):
            assert ends[n][1] == expected(prompt_of(30, seed=n), params)
        assert max(len(x.queries) for x in p.decoder.launches) == 3
        p.require_sound()


@pytest.mark.parametrize("at", [1, 20])
def test_a_column_whose_choice_fails_leaves_its_neighbours_alone(at: int) -> None:
    with parts() as p:
        p.decoder.pause_s = 0.001
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        tickets = [p.loop.submit(prompt_of(30, seed=n), params) for n in range(2)]
        wait_for(lambda: p.loop.load.num_running == 2)
        broken = p.loop.submit(prompt_of(30, seed=2), params)
        sampler = broken.sampler
        observe = sampler.observe

        def observed(token_id: int) -> None:
            if len(sampler.output_ids) >= at:
                raise Broken
            observe(token_id)

        sampler.observe = observed
        assert isinstance(failed(broken).error, StepFailed)
        for n, ticket in enumerate(tickets):
            assert ended(ticket)[1] == expected(prompt_of(30, seed=n), params)
        p.require_sound()


def test_whose_listener_fails_is_cancelled_and_others_go_on() -> None:
    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    with parts() as p:
        p.decoder.pause_s = 0.001
        gone = p.loop.submit(prompt_of(30), ENDLESS, listen=closed)
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        other = p.loop.submit(prompt_of(30, seed=1), params)
        assert ended(other)[1] == expected(prompt_of(30, seed=1), params)
        assert ended(gone)[2].finish_reason == "cancelled"
        p.require_sound()


LOST = [
    LaunchError("the decode kernel", "it broke"),
    KernelStuck("block 3", "the residual stream", "nothing"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["read", "start", "tokens", "preempt", "open", "free"])
def test_a_device_that_is_lost_fails_everybody_and_is_said_once(name: str, error) -> None:
    with parts(pages=10, num_host_pages=0) as p:
        p.faults.due[name] = error
        with all_at_once(p):
            tickets = [p.loop.submit(prompt_of(30, seed=n), ENDLESS) for n in range(6)]
        ends = [ended(ticket)[2] for ticket in tickets]
        assert isinstance(ends[-1], Failure)
        for end in ends:
            if isinstance(end, Failure):
                assert isinstance(end.error, EngineStopped)
                assert str(error).split(":")[0] in end.error.message
        wait_for(lambda: bool(p.failures))
        with pytest.raises(EngineStopped):
            p.loop.submit(prompt_of(5), SHORT)
        assert p.loop.close(within_s=WAIT_S)
        assert len(p.failures) == 1


def test_memory_that_ran_out_is_no_lost_device() -> None:
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_lost(MemoryError())
    assert is_lost(torch.AcceleratorError("CUDA error: unspecified launch failure"))


def breaks_scheduler(p: Parts, error: BaseException) -> None:
    def next_step() -> None:
        raise error

    p.loop._core.scheduler.next = next_step


def breaks_close(p: Parts, error: BaseException) -> None:
    p.faults.due["free"] = error


def breaks_read(p: Parts, error: BaseException) -> None:
    p.faults.due["read"] = error


def loses_a_page(p: Parts, _: BaseException) -> None:
    def read(_: Request) -> None:
        p.executor.allocator.pages.allocate(1)
        raise Broken

    p.executor.read = read


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        (breaks_scheduler, Broken("queue")),
        (breaks_close, Broken("queue")),
        (breaks_read, SystemExit("queue")),
        (breaks_read, KeyboardInterrupt("queue")),
        (loses_a_page, Broken("queue")),
    ],
)
def test_what_nobody_can_go_on_after_ends_the_loop(breaks, error: BaseException, caplog) -> None:
    with parts() as p:
        with p.loop._core.changed:  # the loop's thread looks for a step where it has this
            breaks(p, error)
            tickets = [p.loop.submit(prompt_of(30, seed=n), SHORT) for n in range(3)]
        ends = [ended(ticket)[2] for ticket in tickets]
        assert isinstance(ends[-1], Failure)
        wait_for(lambda: bool(p.failures))
        assert "the engine stops" in caplog.text
        with pytest.raises(EngineStopped):
            p.loop.submit(prompt_of(5), SHORT)
        if breaks is not breaks_scheduler and isinstance(error, Exception):
            assert "could not free all memory" in p.failures[0].message


def test_whoever_hears_of_the_end_may_fail(caplog) -> None:
    with parts() as p:
        p.failures = None  # as `on_failure` is bound, it still hears
        p.loop._on_failure = lambda _: 1 / 0
        p.faults.due["read"] = LOST[0]
        assert isinstance(failed(p.loop.submit(prompt_of(30), SHORT)).error, EngineStopped)
        assert p.loop.close(within_s=WAIT_S)
        assert "ZeroDivisionError" in caplog.text


def test_requests_of_a_stuck_thread_can_be_failed_from_outside() -> None:
    with parts() as p:
        p.decoder.pause_s = 0.001
        go, run = threading.Event(), p.prefill.run

        def held_up(*args, **named):
            go.wait(WAIT_S)
            return run(*args, **named)

        first = p.loop.submit(prompt_of(30), ENDLESS)
        wait_for(lambda: p.decoder.num_rounds > 3)
        p.prefill.run = held_up
        second = p.loop.submit(prompt_of(70), SHORT)
        wait_for(lambda: p.loop.progress.age_s > 0.05)
        asked = time.perf_counter()
        p.loop.abandon(Stalled(120.0, p.loop.progress.step))
        for ticket in (first, second):
            assert "no progress for 120 s while reading a prompt" in failed(ticket).error.message
        assert time.perf_counter() - asked < 1
        with pytest.raises(EngineStopped):
            p.loop.submit(prompt_of(5), SHORT)
        assert not p.loop.close(within_s=0.05), "it is still held up"
        go.set()
        assert p.loop.close(within_s=WAIT_S)
        assert not p.failures, "who abandons it knows"
        assert not first.take()
        assert not second.take()


def test_abandoned_without_requests_it_ends() -> None:
    with parts() as p:
        p.loop.abandon(ShuttingDown())
        assert p.loop.close(within_s=WAIT_S)


def test_a_sequence_that_fails_on_the_reference_fails_alone() -> None:
    etude = Engine.load(EngineConfig("etude-draft", device="cpu", context_tokens=200, sequences=3))
    prompts = [etude.tokenizer.encode(text) for text in ("def f(x):\n", "class A:\n", "x = 1\n")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = [list(etude.generate(prompt, params))[-1].token_ids for prompt in prompts]
    forward = etude.model.reference.forward
    passes: dict[int, int] = {}
    caches: list[object] = []

    def broken(ids, start, cache, logits, **more):
        if cache not in caches:
            caches.append(cache)
        passes[id(cache)] = passes.get(id(cache), 0) + 1
        if caches.index(cache) == 1 and passes[id(cache)] == 5:
            raise Broken
        return forward(ids, start, cache, logits, **more)

    etude.model.reference.forward = broken
    loop = EngineLoop(etude.model, etude.tokenizer, etude.config.vocab_size)
    ends = [ended(t) for t in [loop.submit(prompt, params) for prompt in prompts]]
    assert isinstance(ends[1][2], Failure)
    for n in (0, 2):
        assert tuple(ends[n][1]) == alone[n]
    assert loop.close(within_s=WAIT_S)
    etude.model.check()
    assert etude.model.num_pages_free == etude.model.num_pages > 0


def test_reference_memory_that_runs_out_while_opening_is_not_lost() -> None:
    etude = Engine.load(EngineConfig("etude-draft", device="cpu", context_tokens=200))
    model, make = etude.model, etude.model.reference.new_cache

    def no_memory(_: int) -> None:
        model.reference.new_cache = make
        raise MemoryError

    model.reference.new_cache = no_memory
    loop = EngineLoop(model, etude.tokenizer, etude.config.vocab_size)
    prompt = etude.tokenizer.encode("def f")
    whole = SamplingParams(max_tokens=200 - len(prompt), ignore_eos=True)
    assert isinstance(failed(loop.submit(prompt, whole)).error, StepFailed)
    assert len(ended(loop.submit(prompt, whole))[1]) == whole.max_tokens, "all pages are free again"
    assert loop.close(within_s=WAIT_S)


def test_books_that_do_not_balance_are_found() -> None:
    def wrongs(p: Parts) -> list[Callable[[], object]]:
        allocator = p.executor.allocator
        (allocation,) = allocator._open
        return [
            lambda: allocator.pages.allocate(1),
            lambda: allocator.pages.free([allocation.pages[-1]]),
            lambda: allocation.owned.add(allocation.pages[0]),
            allocation.owned.pop,
            lambda: allocation.pages.append(allocator.pages.allocate(1)[0]),
            allocator._free_rows.pop,
            lambda: allocator._free_rows.append(allocation.row),
            lambda: allocator.tiers.host_pages.allocate(1),
            lambda: allocator.tree.use(allocation.node),
            lambda: allocator.tree.release(allocation.node),
            lambda: setattr(allocator.tree, "idle_tokens", 1),
            lambda: setattr(allocator.tree, "num_tokens", 1),
        ]

    for number in range(12):
        with parts() as p:
            p.decoder.pause_s = 0.001
            ticket = p.loop.submit(prompt_of(70), ENDLESS)
            wait_for(lambda p=p: p.decoder.num_rounds > 3)
            ticket.cancel()
            ended(ticket)
            wait_for(lambda p=p: p.loop.load.num_running == 0)
        sampler = Sampler(SHORT, VOCAB, prompt_of(70), frozenset())
        opened(p.executor, prompt_of(70), sampler)
        p.executor.check()
        wrongs(p)[number]()
        with pytest.raises(AssertionError):
            p.executor.check()


def test_the_scheduler_forgets_who_fails_wherever_it_is() -> None:
    rng = random.Random(0)
    for _ in range(300):
        s: Scheduler[int] = Scheduler(3, 10)
        inside: list[int] = []
        for key in range(20):
            if not s.is_full:
                s.submit(key)
                inside.append(key)
            step = s.next()
            if step is not None and hasattr(step, "key") and step.key == s_first_waiting(s):
                s.joined(step.key)
            elif step is not None and hasattr(step, "key") and rng.random() < 0.5:
                s.was_read(step.key)
            if inside and rng.random() < 0.4:
                s.leave(inside.pop(rng.randrange(len(inside))))
        for key in inside:
            s.leave(key)
        assert s.num_running == s.num_waiting == 0
        assert s.next() is None


def s_first_waiting(scheduler: Scheduler[int]) -> int | None:
    return scheduler._waiting[0] if scheduler._waiting else None


def test_errors_are_named() -> None:
    assert "could not free all memory" in MemoryNotFreed(AssertionError("x")).message
    assert (StepFailed("decoding", Broken()).exit_status, LOST[0].exit_status) == (2, 3)
    assert Stalled(1.0, "decoding").exit_status == 4
