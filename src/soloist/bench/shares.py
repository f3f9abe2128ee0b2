"""What a token's time goes to, in six words, from a traced round. Pure.

A block's time stamps tell waiting from multiplying, but not multiplying from waiting for memory:
the stream runs ahead of it. What multiplying takes alone comes from a second traced round, of a
build without the stream, in which all weights are taken to be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soloist.bench.timeline import PhaseTime, Timeline

Name = Literal["streaming", "exchanges", "multiplication", "attention", "sampling", "host"]
_SAMPLING = ("choose", "conclude")


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a token's time: mean over blocks, in us."""

    name: Name
    us: float


@dataclass(frozen=True, slots=True)
class PhaseTraffic:
    """What one phase of all layers reads.

    Attributes:
        phase: as in `PhaseTime`.
        num_bytes: weights, or keys and values.
        mbu: these bytes over the phase's time, as a share of the bandwidth. The stream runs ahead,
            so a phase that waits little may be above 1, and another one lower than it read.
    """

    phase: str
    num_bytes: int
    mbu: float


def shares(made: Timeline, phases: Sequence[PhaseTime]) -> list[Share]:
    """Parts of a token's time, which add up to the round and the host's part.

    Empty where the file does not tell what multiplying takes alone: those of older versions.
    """
    about = made.about
    if not about.resident_us or about.host_us is None:
        return []
    sums: dict[Name, float] = {
        "streaming": 0.0,
        "exchanges": sum(phase.waiting_us for phase in phases),
        "multiplication": 0.0,
        "attention": 0.0,
        "sampling": 0.0,
        "host": about.host_us,
    }
    for phase in phases:
        alone = min(phase.multiplying_us, about.resident_us.get(phase.phase, phase.multiplying_us))
        sums["streaming"] += phase.multiplying_us - alone
        sums[_work_of(phase.phase)] += alone + phase.finishing_us
    return [Share(name, us) for name, us in sums.items()]


def _work_of(phase: str) -> Name:
    if phase in _SAMPLING:
        return "sampling"
    return "attention" if phase == "attention" else "multiplication"


def traffic(made: Timeline, phases: Sequence[PhaseTime]) -> list[PhaseTraffic]:
    """Of the phases that read something, in their order."""
    about = made.about
    return [
        PhaseTraffic(phase.phase, read, read / phase.total_us / 1e3 / about.bandwidth_gb_per_s)
        for phase in phases
        if (read := about.phase_bytes.get(phase.phase, 0)) and phase.total_us > 0
    ]
