"""What the watchdog reports of a stuck block, in words. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soloist.megakernel.abi import FAULT, WHERE
from soloist.megakernel.program import PHASES


@dataclass(frozen=True, slots=True)
class Fault:
    """A block's report: `FAULT` and `WHERE` of abi.py.

    Attributes:
        block, sm: which block, and on which SM it runs.
        round, layer, phase: where its consumers are; `phase` counts `PHASES`.
        producer_round, producer_layer: where its producer is.
        copies: slots of the ring that the producer has asked memory for, in this launch.
        landed: of them, those that memory has delivered.
        released: of them, those that all consumer warps have read.
        missing: bits of the ranks whose data its consumers lack.
    """

    block: int
    sm: int
    round: int
    layer: int
    phase: int
    producer_round: int
    producer_layer: int
    copies: int
    landed: int
    released: int
    missing: int

    @classmethod
    def of_words(cls, words: Sequence[int]) -> "Fault | None":
        """From the host's copy of the report; None where no block has reported."""
        values = np.array([word & 0xFFFFFFFF for word in words], np.uint32)
        report = values[: FAULT.num_bytes // 4].view(FAULT.dtype)[0]
        if not report["code"]:
            return None
        own = {name: int(report[name]) for name in FAULT.offsets if name not in {"code", "where"}}
        return cls(**own, **{name: int(report["where"][name]) for name in WHERE.offsets})

    @property
    def where(self) -> str:
        """Block, SM, round, layer and phase."""
        return (
            f"block {self.block} on SM {self.sm} in round {self.round}, layer {self.layer}, "
            f"phase {PHASES[self.phase].name}"
        )

    @property
    def needs(self) -> str:
        """What the phase waits for."""
        return PHASES[self.phase].needs

    @property
    def seen(self) -> str:
        """How far the stream is, and so which side is behind."""
        ready, in_flight = self.landed - self.released, self.copies - self.landed
        if ready:
            verdict = f"{ready} slots of its ring are ready and unread, so other blocks are behind"
        elif in_flight:
            verdict = f"nothing in its ring is ready and {in_flight} copies are under way, so "
            verdict += "memory is behind"
        else:
            verdict = "its ring is empty and no copy is under way, so its own producer is behind"
        return (
            f"its weight loads are in round {self.producer_round}, layer {self.producer_layer}, "
            f"after {self.copies} copies; {self.landed} have landed and {self.released} were read; "
            f"{verdict}"
        )


@dataclass(frozen=True, slots=True)
class RanksFault:
    """What several ranks reported, of which at least one has.

    Attributes:
        faults: by rank; None of a rank that said nothing.
        devices: the GPU of each rank.
    """

    faults: Mapping[int, Fault | None]
    devices: Sequence[int]

    @property
    def rank(self) -> int:
        """Where to look: a rank that waits for no other, or else the first that reported."""
        reported = [rank for rank, fault in self.faults.items() if fault is not None]
        return next((rank for rank in reported if not self._awaited(rank)), reported[0])

    def _awaited(self, rank: int) -> list[int]:
        """Whom a rank waits for; nobody as long as its own data is missing too."""
        fault = self.faults[rank]
        if fault is None or fault.missing >> rank & 1:
            return []
        return [other for other in self.faults if fault.missing >> other & 1]

    @property
    def _own(self) -> Fault:
        fault = self.faults[self.rank]
        assert fault is not None, "it reported"
        return fault

    @property
    def where(self) -> str:
        """Rank and GPU, then as of one rank."""
        return f"{self._name(self.rank)}: {self._own.where}"

    @property
    def needs(self) -> str:
        """What its phase waits for."""
        others = self._awaited(self.rank)
        partial = f"partial sums or choices of {_listed(others)}" if others else ""
        return partial or self._own.needs

    @property
    def seen(self) -> str:
        """How far its weight loads are, and which rank waited for which."""
        parts = [self._own.seen]
        for rank, fault in self.faults.items():
            if fault is None:
                parts.append(f"{self._name(rank)} reported nothing")
            elif rank != self.rank:
                others = self._awaited(rank)
                awaited = _listed(others) if others else "blocks of its own"
                parts.append(f"{self._name(rank)} waited for {awaited} ({fault.where})")
        return "; ".join(parts)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on GPU {self.devices[rank]}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
