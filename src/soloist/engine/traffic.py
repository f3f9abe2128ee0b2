"""Bytes that decoding had to move. Pure: what MBU is made of, by the same counts as `planning`."""

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.kv.memory import kv_bytes_seen
from soloist.model.config import ModelConfig
from soloist.model.kv_format import KvFormat


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a loaded model reads for its tokens.

    Attributes:
        weights_bytes: that one step reads.
        config: tells how much of the KV cache a position sees.
        kv: how keys and values are stored.
        shares_steps: whether sequences that decode together read the weights once, or each.
    """

    weights_bytes: int
    config: ModelConfig
    kv: KvFormat
    shares_steps: bool


class Burst:
    """Rounds in which the same sequences decode.

    Args:
        traffic: of the model; None where it is not known, and nothing is counted.
        positions: that the first round sees, of each sequence.
    """

    def __init__(self, traffic: Traffic | None, positions: Sequence[int]) -> None:
        self._traffic, self._positions = traffic, positions
        self._num_rounds = 0
        self._steps, self._columns = [0] * len(positions), [0] * len(positions)

    def add_round(self, num_columns: Sequence[int]) -> None:
        """Another round, in which each sequence came further by so many positions.

        By none where it had no step.
        """
        self._num_rounds += 1
        for i, count in enumerate(num_columns):
            self._steps[i] += count > 0
            self._columns[i] += count

    @property
    def num_bytes(self) -> int:
        """Read so far: weights of every step, keys and values of every sequence.

        Of the cache the mean of the first and the last round is taken: exact but where a window
        fills up in between.
        """
        if (traffic := self._traffic) is None:
            return 0
        cache = sum(
            steps * sum(kv_bytes_seen(traffic.config, traffic.kv, at) for at in ends) // 2
            for steps, ends in zip(self._steps, self._ends, strict=True)
        )
        steps = self._num_rounds if traffic.shares_steps else sum(self._steps)
        return steps * traffic.weights_bytes + cache

    @property
    def _ends(self) -> list[tuple[int, int]]:
        """Positions that the first and the last round of each sequence see."""
        pairs = zip(self._positions, self._columns, strict=True)
        return [(first, first + max(1, count) - 1) for first, count in pairs]
