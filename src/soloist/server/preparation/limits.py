"""What reading a request may take, by the size of its body."""

from soloist.server.problems import Problem

# Longer bodies are read by processes of their own, after those before them.
LARGE_BYTES = 256 * 2**10

# Longer ones are conversations, mostly, which come again with every step: who has read one stays
# for others, and has its tokens.
CONVERSATION_BYTES = 32 * 2**10

# Of bodies that are read at once: their texts take a few milliseconds.
QUICK_BYTES = 8 * 2**10

# A request that takes longer makes room for those behind it: its process gives way to all others.
SLOW_CPU_S, SLOW_WALL_S = 0.03, 0.2

# A short request may have a large schema; a long one takes up to twelve times its bytes, to which
# the server adds two while the body is on its way.
_LEAST_BYTES, _TIMES = 64 * 2**20, 12

# Of a processor's time. The slowest texts take a second a megabyte.
_LEAST_S, _S_PER_MB = 2, 2


def memory_bytes(body_bytes: int) -> int:
    """Beyond what the process has anyway."""
    return _LEAST_BYTES + _TIMES * body_bytes


def cpu_s(body_bytes: int) -> int:
    """Whole seconds on a processor."""
    return _LEAST_S + _S_PER_MB * body_bytes // 10**6


def wall_s(body_bytes: int) -> float:
    """Seconds after which the server gives up, on however busy a machine."""
    return 4.0 * cpu_s(body_bytes)


def ended_early(body_bytes: int, after_s: float) -> Problem:
    """Reading the request ended a process."""
    if after_s >= cpu_s(body_bytes):
        return too_much_time(body_bytes)
    return too_much_memory(body_bytes)


def too_much_memory(body_bytes: int) -> Problem:
    """Reading the request needs more memory than it may take."""
    most_mb = memory_bytes(body_bytes) // 2**20
    return Problem(
        400,
        f"reading the request takes more than {most_mb} MB, which its {body_bytes:,} bytes may "
        "take; send less text, or a chat template's variables that make less of it",
        code="too_costly",
    )


def too_much_time(body_bytes: int) -> Problem:
    """Reading the request takes longer than it may."""
    return Problem(
        400,
        f"reading the request takes more than {cpu_s(body_bytes)} s of a processor, which its "
        f"{body_bytes:,} bytes may take; the chat template, the schema or the text is too much",
        code="too_costly",
    )
