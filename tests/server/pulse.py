"""Says when a core was taken away: python -m server.pulse, on the core that is meant.

It says `ready`, sleeps for moments until stdin has more, and writes each span in which it did not
come back in time, as [begin, end] of `time.perf_counter`. A process that sleeps is let in before
those that work, so that a long span is none of theirs: the machine, or who runs it, was elsewhere.
"""

import json
import select
import sys
import time

EVERY_S = 0.002
LATE_S = 0.01


def main() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    spans, last = list[tuple[float, float]](), time.perf_counter()
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        now = time.perf_counter()
        if now - last > EVERY_S + LATE_S:
            spans.append((last + EVERY_S, now))
        last = now
    sys.stdout.write(json.dumps(spans))


if __name__ == "__main__":
    main()
