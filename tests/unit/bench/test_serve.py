"""A toy server whose speed is known is read as what it is, however it sends and counts tokens."""

from dataclasses import replace

import pytest

from soloist.bench import serve
from soloist.bench.client import Api, Target
from soloist.bench.rows import ServeRow
from soloist.errors import ServerFailed, SettingError
from timing import judged
from unit.bench.toy_server import Toy, serving

# What is read wrongly is wrong every time.
_TRIES = 12
PLAN = serve.Plan("a b c d", (), 113, 3, ("warm",))
NOBODY = Target("http://127.0.0.1:9")


def measured(toy: Toy, *, api: Api = "chat", key: str | None = None, **changed: object) -> list:
    with serving(toy):
        return serve.measure(replace(PLAN, **changed), [Target(toy.url, api, key=key)])


@pytest.mark.timed
@pytest.mark.parametrize("counts", ["usage in every chunk", "token ids", "final usage"])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 16])
def test_known_speed_is_read_within_a_percent(tokens_per_chunk: int, counts: str) -> None:
    (row,) = judged(
        lambda: measured(Toy(tokens_per_chunk, counts)),
        lambda rows: check_times(*rows, tokens_per_chunk, counts),
        _TRIES,
    )
    assert row.counting.startswith(counts.replace("final usage", "usage at the end"))
    assert (row.shape, row.new_tokens, row.cached_tokens, row.runs) == ("toy", 113, 1, 3)
    assert row.first_tokens == (None if counts == "final usage" else tokens_per_chunk)


def check_times(row: ServeRow, tokens_per_chunk: int, counts: str) -> None:
    assert row.decode_tokens_per_s.median == pytest.approx(500, rel=0.01)
    first_chunk_ms = 30 + (tokens_per_chunk - 1) * 2
    assert row.ttft_ms.median == pytest.approx(first_chunk_ms, abs=4)
    assert row.gap_ms.p50 == pytest.approx(2 * tokens_per_chunk, rel=0.1)
    if counts == "final usage":
        assert row.token_ms is None
    else:
        assert row.token_ms.p50 == pytest.approx(2, rel=0.1)


def test_what_a_server_tells_of_itself() -> None:
    told = {"predicted_per_second": 512.5, "mbu": 0.75, "bandwidth_gb_per_s": 4440.0}
    (row,) = measured(Toy(4, tokens_per_s=5000, timings=told))
    assert row.server_tokens_per_s.median == 512.5
    assert (row.mbu, row.mbu_by, row.bandwidth_gb_per_s) == (0.75, "the server", 4440.0)
    (less,) = measured(Toy(4, tokens_per_s=5000, timings={"predicted_per_second": 512.5}))
    assert (less.mbu, less.mbu_by, less.bandwidth_gb_per_s) == (None, None, None)
    (nothing,) = measured(Toy(4, tokens_per_s=5000))
    assert nothing.server_tokens_per_s is None


def test_servers_take_turns() -> None:
    """Each is asked once a run, in the order given, and keeps its own key, name and counts."""
    first, second = Toy(4, tokens_per_s=20_000), Toy(1, "token ids", tokens_per_s=20_000)
    order: list[str] = []

    def noting(toy: Toy, name: str) -> Toy:
        def refusal(asked: dict) -> str | None:
            if asked["max_tokens"] == PLAN.max_tokens:
                order.append(name)
            return Toy.refusal(toy, asked)

        toy.refusal = refusal  # type: ignore[method-assign]
        return toy

    with serving(noting(first, "a")), serving(noting(second, "b")):
        targets = [
            Target(first.url, key="k1", name="a"), Target(second.url, key="k2", name="b"),
        ]  # fmt: skip
        made = serve.measure(replace(PLAN, prefixes=("cold", "warm")), targets)
    assert "".join(order) == "ab" * 4 * 2
    assert [(row.engine, row.prefix) for row in made] == [
        ("a", "cold"), ("b", "cold"), ("a", "warm"), ("b", "warm"),
    ]  # fmt: skip
    assert [row.counting for row in made[:2]] == ["usage in every chunk", "token ids"]
    assert {asked["key"] for asked in first.asked} == {"Bearer k1"}
    assert {asked["key"] for asked in second.asked} == {"Bearer k2"}


def test_a_server_that_counts_nothing_gets_no_decode_speed() -> None:
    (row,) = measured(Toy(4, "nothing", tokens_per_s=5000))
    assert row.decode_tokens_per_s is None
    assert "counts no tokens" in row.no_decode_speed
    assert (row.prompt_tokens, row.new_tokens) == (None, None)
    assert row.ttft_ms.median > 30


@pytest.mark.timed
def test_a_prompt_that_is_sent_back_is_no_first_token() -> None:
    def check(row: ServeRow) -> None:
        assert row.gap_ms is not None
        assert row.gap_ms.p99 < 20

    def echoed() -> ServeRow:
        (row,) = measured(Toy(1, "final usage", tokens_per_s=5000, echoes=True))
        assert row.ttft_ms.min > 30
        return row

    judged(echoed, check, _TRIES)


def test_an_answer_in_one_piece_gets_no_decode_speed() -> None:
    (row,) = measured(Toy(500, tokens_per_s=5000))
    assert row.decode_tokens_per_s is None
    assert "at once" in row.no_decode_speed


def test_fields_that_a_server_refuses_are_left_out() -> None:
    toy = Toy(4, "token ids", tokens_per_s=5000, refuses=("ignore_eos", "continuous_usage_stats"))
    (row,) = measured(toy, key="sk-1")
    assert row.fields == ("include_usage", "return_token_ids")
    assert row.counting == "token ids"
    assert toy.asked[-1]["stream_options"] == {"include_usage": True}
    assert {asked["key"] for asked in toy.asked} == {"Bearer sk-1"}


def test_prompts_have_the_length_asked_for_and_begin_as_asked_for() -> None:
    toy = Toy(tokens_per_s=50_000, first_s=0)
    rows = measured(
        toy, api="completions", prompt=None, prompt_tokens=(50, 3000), prefixes=("cold", "warm")
    )
    assert [(row.asked_prompt_tokens, row.prefix) for row in rows] == [
        (50, "cold"), (50, "warm"), (3000, "cold"), (3000, "warm"),
    ]  # fmt: skip
    for row in rows:
        assert row.prompt_tokens == pytest.approx(row.asked_prompt_tokens, rel=0.01)
    last = [asked["prompt"] for asked in toy.asked if asked["max_tokens"] == PLAN.max_tokens]
    cold, warm = last[8:12], last[12:]
    assert len({prompt[:40] for prompt in cold}) == len(cold) == 4
    assert len({*warm}) == 1
    assert {len(prompt) for prompt in cold} == {len(warm[0])}


def test_servers_that_fail() -> None:
    with pytest.raises(ServerFailed, match="out of memory"):
        measured(Toy(fails="out of memory"))
    with pytest.raises(ServerFailed, match="unknown field: model"):
        measured(Toy(refuses=("model",)))
    with pytest.raises(ServerFailed, match="127"):
        serve.measure(PLAN, [NOBODY])


@pytest.mark.parametrize("changed", [{"max_tokens": 1}, {"runs": 0}, {"prompt_tokens": (0,)}])
def test_what_cannot_be_measured_is_refused(changed: dict) -> None:
    with pytest.raises(SettingError):
        serve.measure(replace(PLAN, **changed), [NOBODY])


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(SettingError, match="URL"):
        serve.measure(PLAN, [Target("localhost:8000")])
