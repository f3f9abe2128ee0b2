"""An agent's loop against the toy server: what is sent, how long a step takes, what it costs."""

from dataclasses import replace

import pytest

from soloist.bench import agent
from soloist.bench.agent import _reply
from soloist.bench.client import Api, Target
from soloist.bench.rows import AgentRow
from soloist.errors import ServerFailed, SettingError
from soloist.planning.cost import ApiPrices, Machine
from timing import judged
from unit.bench.toy_server import Toy, serving

PLAN = agent.Plan(
    turns=3, prompt_tokens=100, tool_tokens=20, max_tokens=50, runs=2,
    machine=Machine(36.0, 0.5), api_prices=ApiPrices(1.0, 0.5, 4.0),
)  # fmt: skip


def measured(toy: Toy, *, api: Api = "chat", **changed: object):
    with serving(toy):
        (row,) = agent.measure(replace(PLAN, **changed), [Target(toy.url, api, name="toy")])
    return row


def test_each_step_sends_all_that_was_said() -> None:
    toy = Toy(4, tokens_per_s=20_000, first_s=0.01)
    row = measured(toy)
    loops = [asked["messages"] for asked in toy.asked if asked["max_tokens"] == 50]
    assert len(loops) == 3 * 3, "one loop warms up"
    for first, second, third in (loops[i : i + 3] for i in (0, 3, 6)):
        assert [m["role"] for m in third] == ["user", "assistant", "user", "assistant", "user"]
        assert third[:3] == second
        assert second[:1] == first
        assert second[1]["content"] == "word " * 50
        assert second[2]["content"] != third[4]["content"], "tools return something new"
    beginnings = {first[0]["content"][:40] for first in loops[::3]}
    assert len(beginnings) == 3, "no loop finds another one's prompt in a cache"
    assert [t.new_tokens for t in row.by_turn] == [50, 50, 50]
    assert row.by_turn[1].cached_tokens == 1
    assert row.by_turn[0].prompt_tokens == len(loops[0][0]["content"]) // 4


def test_a_prompt_that_is_sent_back_is_not_said_again() -> None:
    toy = Toy(4, "final usage", tokens_per_s=20_000, first_s=0.01, echoes=True)
    measured(toy, turns=2, runs=1)
    second = [asked["messages"] for asked in toy.asked if asked["max_tokens"] == 50][1]
    assert second[1]["content"] == "word " * 50


def test_a_template_changes_what_is_sent_back() -> None:
    told = ["def f(x):\n    return 1\n", "    y = 2", "tool says 5"]
    shown = "# def f(x):\n#   return 1\n    y = 2\n# tool says 5\n"
    assert _reply(shown + "    z = 3", told) == "\n    z = 3"
    assert _reply("    z = 3", told) == "    z = 3"
    assert _reply("tool says 5\ndef f(x):", told) == "tool says 5\ndef f(x):", (
        "an answer may repeat"
    )


@pytest.mark.timed
def test_times_of_known_speed() -> None:
    """50 tokens at 500 a second, the first after 30 ms: 128 ms a step."""

    def check(row: AgentRow) -> None:
        assert row.step_ms.p50 == pytest.approx(30 + 49 * 2, rel=0.05)
        assert row.ttft_ms is not None
        assert row.ttft_ms.p50 == pytest.approx(30, abs=4)
        assert row.decode_tokens_per_s.median == pytest.approx(500, rel=0.01)
        assert row.loop_s.median == pytest.approx(3 * 0.128, rel=0.05)

    judged(lambda: measured(Toy(1, tokens_per_s=500, first_s=0.03)), check, 12)


def test_cost_is_the_arithmetic_that_is_shown() -> None:
    row = measured(Toy(4, tokens_per_s=20_000, first_s=0.01))
    seconds = row.mean_step_ms / 1e3
    assert row.machine_cost_per_step == pytest.approx(seconds * 36 / 3600 / 0.5, rel=1e-3)
    # One token of each prompt is cached; prompts of the toy are counted at four characters.
    prompts = [turn.prompt_tokens for turn in row.by_turn]
    by_api = sum((p - 1) * 1e-6 + 0.5e-6 + 50 * 4e-6 for p in prompts) / 3
    assert row.api_cost_per_step == pytest.approx(by_api, rel=1e-2)
    assert (row.price_per_hour, row.utilisation, row.api_prices) == (36.0, 0.5, (1.0, 0.5, 4.0))
    free = measured(Toy(4, tokens_per_s=20_000), machine=None, api_prices=None, turns=1)
    assert (free.machine_cost_per_step, free.api_cost_per_step) == (None, None)


def test_a_server_that_counts_only_at_the_end() -> None:
    row = measured(Toy(4, "final usage", tokens_per_s=20_000))
    assert row.counting.startswith("usage at the end")
    assert (row.ttft_ms, row.decode_tokens_per_s) == (None, None)
    assert [t.new_tokens for t in row.by_turn] == [50, 50, 50]
    assert row.api_cost_per_step is not None


def test_a_server_that_counts_nothing_has_no_cost_by_tokens() -> None:
    row = measured(Toy(4, "nothing", tokens_per_s=20_000))
    assert row.api_cost_per_step is None
    assert row.machine_cost_per_step is not None
    assert row.by_turn[0].prompt_tokens is None


def test_texts_grow_as_conversations_do() -> None:
    toy = Toy(4, tokens_per_s=20_000, first_s=0.01)
    measured(toy, api="completions", turns=2, runs=1)
    first, second = [asked["prompt"] for asked in toy.asked if asked["max_tokens"] == 50][:2]
    assert second.startswith(first)
    assert "word " * 50 in second


def test_what_cannot_be_measured_is_refused() -> None:
    nobody = [Target("http://127.0.0.1:9")]
    for changed in ({"turns": 0}, {"runs": 0}, {"tool_tokens": 0}, {"prompt_tokens": 0}):
        with pytest.raises(SettingError):
            agent.measure(replace(PLAN, **changed), nobody)
    with pytest.raises(ServerFailed):
        agent.measure(PLAN, nobody)


def test_servers_take_turns() -> None:
    fast, slow = Toy(4, tokens_per_s=20_000, first_s=0.0), Toy(4, tokens_per_s=500, first_s=0.1)
    with serving(fast), serving(slow):
        targets = [Target(toy.url) for toy in (fast, slow)]
        first, second = agent.measure(replace(PLAN, turns=1, runs=1), targets)
    assert first.url != second.url
    assert second.loop_s.median > 0.1 + 49 / 500 - 0.01
    assert first.loop_s.median < second.loop_s.median
