"""The decode kernel's arithmetic on the CPU: an oracle for what the plan says and the host packs.

Every block takes its turn in every phase and touches what the kernel's block would: its slots of
the image, its rows of the residual, its pages of the KV pool, and exchange buffers laid out as the
plan says. On the way it is checked that each value of an exchange is written once and before it is
read. Several ranks run side by side, from one exchange between them to the next. What it cannot
show is anything about time: waits, the ring, memory order.

`phases` runs the phases of a round. It is made of `residual` (the stream), `attention` (with
`split`, `projection`, `cache`, `softmax` and `partials`) and `logits` (and tokens), over `exchange`
(buffers) and `weights` (with `tiles` and `multiply`). `lanes` runs models with lanes, whose partial
results come through `published`.
"""

from soloist.megakernel.interpreter.lanes import LaneInterpreter, lanes_of_plan, round_of_lanes
from soloist.megakernel.interpreter.memory import Memory
from soloist.megakernel.interpreter.phases import Interpreter, round_of_ranks

__all__ = [
    "Interpreter",
    "LaneInterpreter",
    "Memory",
    "lanes_of_plan",
    "round_of_lanes",
    "round_of_ranks",
]
