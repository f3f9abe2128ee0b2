"""Prompts in passes of widths that agree: few passes, hits at every chunk, nobody kept waiting."""

import random
from collections import deque

import pytest
import torch

from soloist.engine.core import tokens_of
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.loop import EngineLoop
from soloist.engine.request import Request
from soloist.sampling import Sampler, SamplingParams
from unit.engine.fakes import VOCAB, Cache, FakeDecoder, FakeHost, FakePrefill, opened
from unit.engine.test_kernel import EOS, expected, prompt_of
from unit.engine.test_loop import Words, ended

WIDTHS = (256, 384, 512, 1024, 2048)
BLOCK, PAGE, CONTEXT = 256, 64, 5120
ONE = SamplingParams(max_tokens=1)


class Parts:
    def __init__(
        self, num_pages: int = 80, num_host_pages: int = 0, chunk_tokens: int = 512,
        widths: tuple[int, ...] = WIDTHS,
    ) -> None:  # fmt: skip
        cache = Cache()
        self.decoder = FakeDecoder(cache, sequences=4)
        self.decoder.page_tables = torch.zeros(4, CONTEXT // PAGE, dtype=torch.int32)
        self.prefill = FakePrefill(cache, widths[-1], widths)
        self.executor = KernelExecutor(
            self.decoder, self.prefill, num_pages, VOCAB, chunk_tokens, keeps_prefixes=True,
            host=FakeHost(cache, num_host_pages),
        )  # fmt: skip

    def open(self, prompt: list[int], params: SamplingParams = ONE) -> Request:
        return opened(self.executor, prompt, Sampler(params, VOCAB, prompt, EOS))

    def read(self, running: Request) -> list[int]:
        """Read it to its first token; what passes had."""
        self.prefill.chunks.clear()
        while True:
            assert self.executor.reserve([running])
            if self.executor.read(running) is not None:
                assert running.sampler.output_ids == expected(list(running.prompt_ids), ONE)
                return self.prefill.chunks

    def read_alone(self, prompt: list[int]) -> tuple[list[int], int]:
        """Passes, and how many tokens were cached."""
        running = self.open(prompt)
        passes = list(self.read(running))
        self.executor.free(running)
        return passes, running.num_cached


@pytest.mark.parametrize(
    ("tokens", "passes"),
    [(100, [100]), (256, [256]), (700, [700]), (2048, [2048]), (4100, [2048, 2048, 4])],
)
def test_a_prompt_alone_has_the_widest_passes(tokens: int, passes: list[int]) -> None:
    assert Parts().read_alone(prompt_of(tokens)) == (passes, 0)


def test_beside_others_passes_are_those_that_a_stream_may_wait_for() -> None:
    p = Parts()
    other = p.open(prompt_of(30))
    running = p.open(prompt_of(1300))
    assert p.read(running) == [512, 512, 276]
    p.executor.free(running)
    p.executor.free(other)
    assert p.read_alone(prompt_of(1300, seed=1))[0] == [1300]


@pytest.mark.parametrize("chunk_tokens", [300, 400, 600, 4096])
def test_no_pass_beside_others_is_wider_than_allowed(chunk_tokens: int) -> None:
    p = Parts(chunk_tokens=chunk_tokens)
    p.open(prompt_of(30))
    passes = p.read(p.open(prompt_of(2500)))
    assert max(passes) == {300: 256, 400: 256, 600: 512, 4096: 2048}[chunk_tokens]
    assert sum(passes) == 2500
    p = Parts(chunk_tokens=300, widths=(512, 1024))
    assert p.read_alone(prompt_of(700))[0] == [256, 256, 188], "no wider than a chunk"


def test_a_pass_that_is_narrower_than_a_chunk_says_nothing_about_wider_ones() -> None:
    """It takes hardly less time, so others would be thought to take several times as long."""
    p = Parts(widths=(128, 192, *WIDTHS))
    stream = p.open(prompt_of(30), SamplingParams(max_tokens=50, ignore_eos=True))
    p.read(stream)
    seen = []
    for tokens in (512 + 100, 512 + 200):
        running = p.open(prompt_of(tokens, tokens))
        while not running.is_read:
            assert p.executor.reserve([stream, running])
            p.executor.read(running)
            for _ in p.executor.rounds([stream], 1):
                pass
        seen.append(set(p.executor._pace._seen))
        p.executor.free(running)
    assert p.prefill.chunks[-1] == 200
    assert seen[0] <= {256, 512}
    assert not any(width < 256 for width in seen[1])


def test_hits_go_on_at_every_block() -> None:
    p, stem = Parts(), prompt_of(3000)
    p.read_alone(stem)
    for shared in (255, 256, 300, 1279, 1280, 2900):
        cached = shared // BLOCK * BLOCK
        prompt = stem[:shared] + [(i + 1) % VOCAB for i in stem[shared : shared + 40]]
        assert p.read_alone(prompt) == ([len(prompt) - cached], cached)
    assert p.read_alone(stem) == ([3000 - 2816], 2816)
    assert p.read_alone(stem[:2816]) == ([256], 2560), "its last token has to be read"


def test_prompts_that_begin_alike_at_the_same_time_are_read_once() -> None:
    p, shared = Parts(num_pages=120), prompt_of(2000)
    running = [p.open(shared + prompt_of(30, seed=n)) for n in range(3)]
    waiting = deque(running)
    while waiting:
        sequence = waiting.popleft()
        assert p.executor.reserve([sequence])
        if p.executor.read(sequence) is None:
            waiting.append(sequence)
    assert sorted(p.prefill.chunks) == [238, 238, *[494] * 1, *[512] * 3]
    assert [r.num_cached for r in running] == [0, 1792, 1792]
    for sequence in running:
        assert sequence.sampler.output_ids == expected(list(sequence.prompt_ids), ONE)


def test_blocks_come_back_from_the_host_as_many_at_a_time_as_a_pass_reads() -> None:
    p = Parts(num_pages=80, num_host_pages=200)
    first, second = prompt_of(5000), prompt_of(5000, seed=1)
    p.read_alone(first)
    p.read_alone(second)
    assert p.executor.cached.on_host >= 4000
    running = p.open(first)
    num_steps = 0
    while running.num_read < 4864:
        assert p.executor.reserve([running])
        assert p.executor.read(running) is None
        num_steps += 1
    assert num_steps <= 3, "2,048 tokens a step"
    assert p.read(running) == [136]
    assert p.executor.cached.fetched == running.num_offloaded > 0


def test_nothing_is_read_after_a_cancel() -> None:
    p = Parts()
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 3  # before it joins, and before every chunk

    prompt = prompt_of(5000)
    made = tokens_of(p.executor, Request(prompt, Sampler(ONE, VOCAB, prompt, EOS)), cancelled)
    assert list(made) == []
    assert p.prefill.chunks == [2048, 2048]
    assert p.executor.tiers.num_available == 80


@pytest.mark.parametrize("num_host_pages", [0, 20])
def test_answers_side_by_side_are_those_alone(num_host_pages: int) -> None:
    num_cached = num_fetched = 0
    for seed in range(2):
        rng = random.Random(seed)
        p = Parts(num_pages=24, num_host_pages=num_host_pages)
        loop = EngineLoop(p.executor, Words(), VOCAB)
        stems = [prompt_of(1025, seed=n) for n in range(2)]
        for number in range(4):
            asked = []
            for one in range(5):
                end, more = rng.choice([10, 100, 256, 700, 1025]), rng.choice([0, 1, 40])
                prompt = rng.choice(stems)[:end] + prompt_of(more, seed=5 * number + one)
                params = SamplingParams(max_tokens=rng.choice([1, 40, 350]), ignore_eos=True)
                asked.append((prompt, params, loop.submit(prompt, params)))
                if rng.random() < 0.2:
                    asked[-1][2].cancel()
            for prompt, params, ticket in asked:
                _, ids, end = ended(ticket)
                assert ids == expected(prompt, params)[: len(ids)]
                assert ticket.is_cancelled or len(ids) == params.max_tokens
                num_cached += end.timings.cached_tokens
        loop.close()
        assert p.executor.tiers.num_available == 24, "nothing is in use any more"
        num_fetched += p.executor.cached.fetched
    assert num_cached > 2000
    assert (num_fetched > 0) == (num_host_pages > 0)
