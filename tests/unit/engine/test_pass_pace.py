"""How wide passes are beside streams: what is learned, and how long a stream then waits."""

from types import SimpleNamespace

import pytest

from soloist.engine import kernel_executor
from soloist.engine.pass_pace import MOST_GAP_S, PassPace
from soloist.sampling import SamplingParams
from unit.engine.test_kernel import expected, prompt_of
from unit.engine.test_passes import ONE, Parts

WIDTHS = (256, 512, 1024)


def test_the_first_pass_is_narrow_and_others_follow_from_it() -> None:
    pace = PassPace(WIDTHS, 0.03)
    assert pace.widest(0) == 256
    pace.add_round(0.005)
    pace.add_pass(256, 0, 0.010)
    assert pace.widest(0) == 1024, "5 + 4 · 5 ms, and a little"
    pace.add_round(0.007)
    assert pace.widest(0) == 512, "or a slower round"


def test_farther_on_passes_take_longer() -> None:
    pace = PassPace(WIDTHS, 0.03)
    pace.add_pass(256, 0, 0.004)
    assert [pace.widest(start) for start in (0, 256, 2048, 90_000)] == [1024, 1024, 1024, 256]
    pace.add_pass(256, 90_000, 0.012)
    assert pace.widest(90_256) == 512, "it has been there"
    pace.add_pass(512, 90_256, 0.031)
    assert pace.widest(90_768) == 256, "and was too optimistic"


def test_the_narrowest_may_take_too_long() -> None:
    pace = PassPace(WIDTHS, 0.03)
    pace.add_pass(256, 0, 0.5)
    assert pace.widest(256) == 256


class Clock:
    """Time goes on where a fake GPU would work."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def pass_s(tokens: int, position: int) -> float:
    """As of a model of 8 billion parameters: 9 ms for 256 rows, 14 for 512, more farther on."""
    rows = next(w for w in (256, 384, 512, 1024, 2048) if w >= tokens)
    return 0.004 + rows * (2e-5 + 4e-10 * (position + rows))


@pytest.mark.parametrize("round_s", [0.002, 0.007])
def test_no_stream_waits_longer_while_a_long_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, round_s: float
) -> None:
    """And no bit of either answer depends on it."""
    clock, p, gaps = Clock(), Parts(num_pages=200, chunk_tokens=1024), list[float]()
    monkeypatch.setattr(kernel_executor, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    read, make = p.prefill.run, p.decoder._round

    def run(token_ids, position, page_table, *, want_logits=True):  # type: ignore[no-untyped-def]
        clock.now += pass_s(len(token_ids), position)
        return read(token_ids, position, page_table, want_logits=want_logits)

    def one_round(*args):  # type: ignore[no-untyped-def]
        clock.now += round_s
        return make(*args)

    monkeypatch.setattr(p.prefill, "run", run)
    monkeypatch.setattr(p.decoder, "_round", one_round)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = p.open(prompt_of(300, seed=1), params)
    p.executor.read(stream)
    assert stream.is_read
    long = p.open(prompt_of(5000), ONE)
    p.prefill.chunks.clear()
    told_at, picked = clock.now, None
    while picked is None:
        assert p.executor.reserve([long])
        picked = p.executor.read(long)
        assert p.executor.reserve([stream])
        for (outcome,) in p.executor.rounds([stream], 3):
            gaps.append(clock.now - told_at)
            told_at = clock.now
            assert outcome is not None
    assert max(gaps) <= MOST_GAP_S + 1e-9
    assert p.prefill.chunks[0] == 256
    assert max(p.prefill.chunks) >= 512, "and no slower than it has to be"
    assert long.sampler.output_ids == expected(list(long.prompt_ids), ONE)
    made = stream.sampler.output_ids
    assert made == expected(list(stream.prompt_ids), params)[: len(made)]
