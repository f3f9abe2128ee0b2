"""A free column goes first, then balance, then what is cached; a session stays at home."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from soloist.deploy.affinity import Affinity
from soloist.deploy.prefix import PIECE_BYTES, Wish, hashes_of

IDLE = {"a": 0, "b": 0, "c": 0, "d": 0}


def chat(*texts: str) -> Wish:
    """A conversation whose messages are that many times as long."""
    return Wish(hashes_of({"messages": [{"role": "user", "content": t * 1200} for t in texts]}))


def send(policy: Affinity, name: str, wish: Wish, loads=IDLE) -> str:
    best = policy.order(name, wish, loads)[0]
    policy.routed(name, wish, best)
    return best


def test_a_conversation_goes_where_its_beginning_was_read() -> None:
    policy = Affinity(columns=4, imbalance=2)
    homes = {}
    for text in "pqrstuvw":
        homes[text] = send(policy, text, chat(text))
        policy.ended(text)
    for turn in range(3):
        for text, home in homes.items():
            grown = chat(text, *"xyz"[: turn + 1])
            assert send(policy, f"{text}{turn}", grown) == home
            policy.ended(f"{text}{turn}")
    assert len(set(homes.values())) > 1, "beginnings that nobody has read are spread"


def test_what_is_cached_elsewhere_is_worth_a_bounded_imbalance() -> None:
    policy = Affinity(columns=8, imbalance=2)
    home = send(policy, "0", chat("p"))
    there = [send(policy, str(number), chat("p", "q")) for number in range(1, 5)]
    # Three run at home, others none: the fourth is read anew elsewhere, and so is known there.
    assert there[:2] == [home, home]
    assert there[2] != home
    assert Counter(there)[home] < 4


def test_no_replica_gets_more_than_its_columns_while_another_has_one_free() -> None:
    policy = Affinity(columns=2, imbalance=100)
    home = send(policy, "0", chat("p"))
    where = Counter([home, *(send(policy, str(n), chat("p", "q")) for n in range(1, 8))])
    assert set(where.values()) == {2}
    # All are busy: the request waits where fewest do, at home of all that are alike.
    assert send(policy, "8", chat("p", "q")) in IDLE


@given(
    columns=st.integers(1, 8), imbalance=st.integers(0, 4), seed=st.integers(0, 99),
    has_sessions=st.booleans(),
)  # fmt: skip
def test_the_two_bounds_hold_for_any_traffic(columns, imbalance, seed, has_sessions) -> None:
    rng, policy = random.Random(seed), Affinity(columns, imbalance)
    running: dict[str, str] = {}
    for number in range(120):
        if running and rng.random() < 0.45:
            gone = rng.choice(sorted(running))
            policy.ended(gone)
            del running[gone]
        loads = Counter(running.values())
        least = min(loads[name] for name in IDLE)
        wish = Wish(chat(rng.choice("pq")).hashes, rng.choice("xy") if has_sessions else None)
        chosen = send(policy, str(number), wish)
        assert loads[chosen] <= least + imbalance
        assert loads[chosen] < columns or least >= columns
        running[str(number)] = chosen


def test_a_session_keeps_its_home_and_all_routers_agree_on_it() -> None:
    names = [f"session {number}" for number in range(200)]

    def homes(replicas: dict[str, int]) -> dict[str, str]:
        return {name: Affinity(4, 0).order("x", Wish(session=name), replicas)[0] for name in names}

    before = homes(IDLE)
    assert before == homes(dict(reversed(IDLE.items())))
    assert min(Counter(before.values()).values()) > 25
    after = homes({name: 0 for name in IDLE if name != "b"})
    assert {n for n in names if before[n] != after[n]} == {n for n in names if before[n] == "b"}
    busy = Affinity(4, 0).order("x", Wish(session=names[0]), IDLE | {before[names[0]]: 1})
    assert busy[0] != before[names[0]], "a session waits for nobody"


def test_requests_at_one_instant_are_counted_before_any_is_sent() -> None:
    policy = Affinity(columns=1, imbalance=0)
    chosen = [policy.order(str(number), chat("p"), IDLE)[0] for number in range(4)]
    assert sorted(chosen) == sorted(IDLE)
    # Asked for again, as after a replica that did not answer, a request counts once.
    assert policy.order("3", chat("p"), IDLE)[0] == chosen[3]


def test_a_request_that_was_never_sent_is_forgotten() -> None:
    clock = [0.0]
    policy = Affinity(columns=1, imbalance=0, now=lambda: clock[0])
    first = policy.order("lost", Wish(), {"a": 0, "b": 0})[0]
    clock[0] = 60.0
    sent = [policy.order(str(n), Wish(), {"a": 0, "b": 0})[0] for n in range(2)]
    assert first in sent


def test_replicas_that_others_keep_busy_are_passed_over() -> None:
    policy = Affinity(columns=4, imbalance=2)
    home = send(policy, "0", chat("p"))
    policy.ended("0")
    assert send(policy, "1", chat("p"), IDLE | {home: 4}) != home
    assert policy.order("2", chat("p"), {}) == []


def test_memory_is_bounded_and_keeps_what_was_used_last() -> None:
    policy = Affinity(columns=100, imbalance=100, most_hashes=4)
    old, new = chat("pp"), chat("qq")
    assert send(policy, "0", old, {"a": 0, "b": 1}) == "a"
    assert send(policy, "1", new, {"a": 1, "b": 0}) == "b"
    assert list(policy._readers) == list(reversed(new.hashes))
    policy.routed("2", Wish(old.hashes[:2]), "a")
    # What is dropped of a beginning is its end.
    assert policy.order("3", new, {"a": 5, "b": 6})[0] == "b"


def test_hashes_tell_beginnings_apart_wherever_they_differ() -> None:
    system = {"role": "system", "content": "s" * 2000}
    one = hashes_of({"messages": [system, {"role": "user", "content": "a" * 2000}]})
    two = hashes_of({"messages": [system, {"role": "user", "content": "b" * 2000}]})
    common = sum(x == y for x, y in zip(one, two, strict=True))
    assert common == 2000 // PIECE_BYTES + 1 < len(one)  # and a little of the next message
    # The same pieces behind another beginning are another prompt.
    assert not set(hashes_of({"prompt": "x" + "a" * 4096})) & set(hashes_of({"prompt": "a" * 4096}))
    assert hashes_of({"prompt": "short"}) == ()
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 2000}}]
    body = {"messages": [system], "max_tokens": 5}
    assert hashes_of(body | {"tools": tools})[0] != hashes_of(body)[0]
    assert hashes_of(body) == hashes_of(body | {"max_tokens": 7, "stream": True})
    assert hashes_of({"model": "x", **body}) != hashes_of({"model": "y", **body})


def test_a_request_whose_end_is_told_first_leaves_no_load_behind() -> None:
    policy, wish = Affinity(columns=1, imbalance=0), chat("p")
    home = policy.order("0", wish, IDLE)[0]
    policy.ended("0")
    policy.routed("0", wish, home)
    assert send(policy, "1", wish) == home, "its column is free, and it has read the beginning"
    # One that a replica refused is over there, and counts where it went then.
    first = policy.order("2", chat("q"), IDLE)[0]
    policy.ended("2")
    loads = {**IDLE, first: 1}
    second = send(policy, "2", chat("q"), loads)
    assert send(policy, "3", chat("q", "r"), loads) not in {home, first, second}
