"""Time stamps that the kernel takes in a traced round: what each of them ends, and when it was.

A block's part of the trace is two clocks at the start (the GPU's, in ns; its SM's, in cycles), its
marks in cycles, the two clocks again, and the number of its SM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soloist.megakernel.plan import Plan

Activity = Literal["waiting", "multiplying", "finishing"]

# In the order of the kernel's `mark` calls; each names the stretch of time that ends with it, as a
# phase and, in a phase of several, what is done in it.
_FIRST = ("start", "embed")
_LAYER = (
    "qkv wait", "qkv multiply", "qkv finish",
    "attention wait", "attention pages", "attention store", "attention merge",
    "output wait", "output multiply", "output finish",
    "gate_up wait", "gate_up multiply", "gate_up finish",
    "down wait", "down multiply", "down finish",
)  # fmt: skip
_LAST = ("head wait", "head multiply", "choose wait", "choose", "conclude")

# Merging partial results is waiting for them, but for a little work; so is attention's wait, in
# which queries are normed and rotated.
# Multiplying includes waiting for weights and pages: what the stream cannot deliver in time.
_ACTIVITIES: dict[str, Activity] = {
    "wait": "waiting", "merge": "waiting",
    "multiply": "multiplying", "pages": "multiplying", "store": "finishing",
    "finish": "finishing", "embed": "finishing", "choose": "finishing", "conclude": "finishing",
}  # fmt: skip
_CLOCKS = 2


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time between two marks.

    Attributes:
        layer: None outside the layers.
        phase: as in `qkv`.
        name: of this part of the phase.
        activity: what kind of time it is.
    """

    layer: int | None
    phase: str
    name: str
    activity: Activity


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """When one block of the traced round took its marks.

    Attributes:
        sm: where it ran.
        marks_ns: on the GPU's clock, which is one for all SMs.
    """

    sm: int
    marks_ns: tuple[int, ...]


def mark_names(plan: Plan) -> list[str]:
    """The stretches of a round, in order, after the mark that starts them."""
    return [*_FIRST, *(_LAYER * plan.model.num_layers), *_LAST]


def stretches(plan: Plan) -> list[Stretch]:
    """What lies between each two marks."""
    layers = range(plan.model.num_layers)
    return [
        *(_stretch(None, name) for name in _FIRST[1:]),
        *(_stretch(layer, name) for layer in layers for name in _LAYER),
        *(_stretch(None, name) for name in _LAST),
    ]


def num_words(plan: Plan) -> int:
    """64-bit words of one block's trace."""
    return _CLOCKS + len(mark_names(plan)) + _CLOCKS + 1


def block_times(words: Sequence[int]) -> BlockTimes:
    """The marks of one block's trace, brought to the GPU's clock.

    Raises:
        ValueError: the words are not those of a traced round.
    """
    start_ns, start_cycles, *marks, end_ns, end_cycles, sm = words
    if not start_ns < end_ns or not start_cycles < end_cycles:
        raise ValueError("the round was not traced")
    ns_per_cycle = (end_ns - start_ns) / (end_cycles - start_cycles)
    return BlockTimes(
        sm, tuple(start_ns + round((mark - start_cycles) * ns_per_cycle) for mark in marks)
    )


def _stretch(layer: int | None, words: str) -> Stretch:
    phase, *rest = words.split()
    name = rest[0] if rest else phase
    return Stretch(layer, phase, name, _ACTIVITIES[name])
