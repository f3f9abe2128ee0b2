"""What a server does meanwhile, seen by a process of its own: `python -m soloist.bench.observer`.

It reads a `Task` as a line of JSON from stdin, says `ready`, and from then on asks for GET /health
and reads the memory of the server's processes, until stdin ends. Then it writes a `Sight`.
"""

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass

import httpx2

from soloist.bench.process_memory import TreeMemory

_PROBE_EVERY_S = 0.05
_READ_EVERY_S = 0.02
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Task:
    """What to look at.

    Attributes:
        health: URL to ask.
        pid: of the server, or None.
    """

    health: str
    pid: int | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen.

    Attributes:
        health_ms: how long each answer took.
        health_statuses: all that came, or why there was none.
        before_bytes, peak_bytes, after_bytes: memory of the server's processes at the beginning, at
            most and at the end; None without a PID.
    """

    health_ms: list[float]
    health_statuses: list[str]
    before_bytes: int | None
    peak_bytes: int | None
    after_bytes: int | None


def main() -> None:
    """Look until stdin ends."""
    task = Task(**json.loads(sys.stdin.readline()))
    memory = None if task.pid is None else TreeMemory(task.pid)
    readings = [] if memory is None else [memory.read_exactly()]
    is_over = threading.Event()
    took: list[float] = []
    statuses: set[str] = set()

    def probe() -> None:
        with httpx2.Client(timeout=_PATIENCE_S) as http:
            while not is_over.wait(_PROBE_EVERY_S):
                start = time.perf_counter()
                try:
                    statuses.add(str(http.get(task.health).status_code))
                except httpx2.HTTPError as error:
                    statuses.add(type(error).__name__)
                took.append((time.perf_counter() - start) * 1e3)

    def read() -> None:
        while memory is not None and not is_over.wait(_READ_EVERY_S):
            readings.append(memory.read())

    threads = [threading.Thread(target=job) for job in (probe, read)]
    for thread in threads:
        thread.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    if memory is not None:
        readings.append(memory.read_exactly())
    first, most, last = (
        (readings[0], max(readings), readings[-1]) if readings else (None, None, None)
    )
    sight = Sight(took, sorted(statuses), first, most, last)
    sys.stdout.write(json.dumps(asdict(sight)))


if __name__ == "__main__":
    main()
