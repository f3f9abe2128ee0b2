"""Settings of a process that streams: how Python shares it, and how often it looks for garbage."""

import gc
import sys

_SWITCH_S = 0.0005

# Requests leave a few cycles each; the command looked for less garbage while it started.
_OBJECTS_BEFORE_COLLECTING = 100_000


def switch_sooner() -> None:
    """Let threads take turns more often.

    Between two kernels or tokens the engine's thread needs Python for microseconds; a thread that
    reads a long prompt would make it wait for five milliseconds each time.
    """
    sys.setswitchinterval(_SWITCH_S)


def collect_less() -> None:
    """Once a model is loaded: leave all that loading made out of every later collection.

    Otherwise a collection now and then walks it, and every stream waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTING, 20, 20)
