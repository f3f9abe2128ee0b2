"""Time stamps that the kernel takes in a traced round: what each of them ends, and when it was.

A block's part of the trace is two clocks at the start (the GPU's, in ns; its SM's, in cycles), its
marks in cycles, the two clocks again, and the number of its SM. Of a model with experts the number
of those that the round's queries chose follows, for each layer; 0 where it has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soloist.megakernel.plan import Plan
from soloist.megakernel.program import EMBED, LAST, Phase, phases_of

Activity = Literal["waiting", "multiplying", "finishing"]

# The first mark of a round, which ends nothing.
_START = "start"

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
class Span:
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
    """The spans of a round, in order, after the mark that starts them."""
    return [_START, *(f"{x.phase} {x.name}" for x in spans(plan))]


def spans(plan: Plan) -> list[Span]:
    """What lies between each two marks, in the order of the kernel's `mark` calls."""
    phases = [(i, x) for i, layer in enumerate(plan.model.layers) for x in phases_of(layer)]
    return [
        *_marked(None, EMBED),
        *(span for layer, phase in phases for span in _marked(layer, phase)),
        *(x for phase in LAST for x in _marked(None, phase)),
    ]


def num_words(plan: Plan) -> int:
    """64-bit words of one block's trace."""
    return num_time_words(plan) + (plan.model.num_layers if plan.has_experts else 0)


def num_time_words(plan: Plan) -> int:
    """Those of them that are clocks, marks and the SM."""
    return _CLOCKS + len(mark_names(plan)) + _CLOCKS + 1


def chosen_experts(plan: Plan, words: Sequence[int]) -> list[int]:
    """How many experts the queries of the traced round chose, for each layer that has some.

    Args:
        plan: of the kernel.
        words: one block's trace; all blocks say the same.
    """
    return [count for count in words[num_time_words(plan) : num_words(plan)] if count]


def block_times(plan: Plan, words: Sequence[int]) -> BlockTimes:
    """The marks of one block's trace, brought to the GPU's clock.

    Raises:
        ValueError: the words are not those of a traced round.
    """
    start_ns, start_cycles, *marks, end_ns, end_cycles, sm = words[: num_time_words(plan)]
    if not start_ns < end_ns or not start_cycles < end_cycles:
        raise ValueError("the round was not traced")
    ns_per_cycle = (end_ns - start_ns) / (end_cycles - start_cycles)
    return BlockTimes(
        sm, tuple(start_ns + round((mark - start_cycles) * ns_per_cycle) for mark in marks)
    )


def _marked(layer: int | None, phase: Phase) -> list[Span]:
    label = phase.label or phase.name
    return [Span(layer, label, name, _ACTIVITIES[name]) for name in phase.marks]
