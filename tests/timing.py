"""Bounds on times: whatever else a machine does makes a try slower, never quicker.

So the first try that keeps a bound passes. A try that breaks it tells something only on a machine
that is as quick and as quiet as the bounds assume, which nobody promises of a shared one.
"""

import email
import json
import shlex
import textwrap
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import pytest

T = TypeVar("T")

# Bounds hold where a fixed piece of Python takes no longer than this, and a varied one after a
# pause at most so many times as long as over and over: else others use the cores or the caches.
QUICK_WORK_S = 0.0014
MOST_COLD = 2.5
# Noise comes and goes between two looks: one broken bound between them is not yet a fault.
MOST_BROKEN = 3
MAIL = "From: a@b.c\nTo: d@e.f\nContent-Type: text/plain; charset=utf-8\n\nbody\n"


def judged(measure: Callable[[], T], check: Callable[[T], None], tries: int) -> T:
    """What `measure` returned first that `check`, which asserts bounds on times alone, lets pass.

    Fails where bounds were broken on a quiet machine, several times unless there are fewer tries;
    skips where it was not quiet. What `measure` itself asserts fails at once.
    """
    broken = 0
    for _ in range(tries):
        was_quiet = is_quiet()
        found = measure()
        try:
            check(found)
        except AssertionError as error:
            last = error
        else:
            return found
        broken += was_quiet and is_quiet()
        if broken == min(MOST_BROKEN, tries):
            raise last
    pytest.skip(f"this machine was not quiet enough to tell: {last}")


def slowness() -> float:
    """How many times as long this machine takes as one that bounds are made for; at least 1.

    The least of a while: others may have the cores at one moment.
    """
    took = []
    for _ in range(10):
        took.append(_work_s())
        time.sleep(0.02)
    return max(1.0, min(took) / QUICK_WORK_S)


def is_quiet() -> bool:
    """Whether a millisecond can be judged now."""
    hot, cold = min(_varied_s() for _ in range(100)), []
    for _ in range(20):
        time.sleep(0.005)
        cold.append(_varied_s())
    return _work_s() <= QUICK_WORK_S and median(cold) <= MOST_COLD * hot


def _work_s() -> float:
    """For a fixed piece of Python."""
    took = []
    for _ in range(8):
        start, words = time.perf_counter(), {}
        for i in range(20_000):
            words[i % 97] = str(i)
        took.append(time.perf_counter() - start)
    return min(took)


def _varied_s() -> float:
    """For one that touches much code once."""
    start = time.perf_counter()
    email.message_from_string(MAIL).get_content_type()
    textwrap.wrap("some words to be wrapped " * 4, 30)
    shlex.split("a 'b c' d --e=f")
    json.dumps(json.loads('{"a": [1, 2, {"b": null}], "c": "d"}'), indent=1)
    return time.perf_counter() - start
