"""What each frame of a page costs its main thread, from a trace of Chromium's."""

import json
from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import Any

CATEGORIES = ["toplevel", "devtools.timeline"]
FRAME_MS = 1000 / 60
_TASK, _FRAME = "ThreadControllerImpl::RunTask", "FireAnimationFrame"


def costs_ms(trace: bytes) -> list[float]:
    """Processor time of all tasks from one frame to the next, for every frame of the busiest page.

    A clock would also count what other processes do. Processor time still has what a virtual
    machine loses to its neighbours: it is too long at times, and never too short.
    """
    events = json.loads(trace)["traceEvents"]
    frames = Counter(_thread(event) for event in events if event["name"] == _FRAME)
    main = frames.most_common(1)[0][0]
    mine = [event for event in events if _thread(event) == main and event["ph"] == "X"]
    tasks, until = list[dict[str, Any]](), 0.0
    for event in sorted(mine, key=lambda event: event["ts"]):
        # A task inside another one is part of it.
        if event["name"] == _TASK and event["ts"] >= until:
            tasks.append(event)
            until = event["ts"] + event["dur"]
    starts = [task["ts"] for task in tasks]
    draws = [event["ts"] for event in mine if event["name"] == _FRAME]
    firsts = sorted({bisect_right(starts, ts) - 1 for ts in draws} - {-1})
    return [
        sum(task.get("tdur", 0) for task in tasks[first:after]) / 1000
        for first, after in pairwise(firsts)
    ]


def _thread(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event.get("tid", 0)
