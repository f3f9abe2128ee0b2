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

    Attributes:
        num_rounds: so far.
        num_further: positions by which each sequence came further than one a round.

    Args:
        traffic: of the model; None where it is not known, and nothing is counted.
        positions: that the first round sees, of each sequence.
    """

    def __init__(self, traffic: Traffic | None, positions: Sequence[int]) -> None:
        self.num_rounds, self.num_further = 0, [0] * len(positions)
        self._traffic, self._positions = traffic, positions

    def add_round(self, num_columns: Sequence[int]) -> None:
        """Another round, in which each sequence came to so many positions more."""
        self.num_rounds += 1
        for i, count in enumerate(num_columns):
            self.num_further[i] += count - 1

    @property
    def num_bytes(self) -> int:
        """Read so far: weights of every step, keys and values of every sequence.

        Of the cache the mean of the first and the last round is taken: exact but where a window
        fills up in between.
        """
        traffic, rounds = self._traffic, self.num_rounds
        if traffic is None or rounds == 0:
            return 0
        steps = 1 if traffic.shares_steps else len(self._positions)
        ends = [
            at
            for first, further in zip(self._positions, self.num_further, strict=True)
            for at in (first, first + rounds - 1 + further)
        ]
        twice = sum(kv_bytes_seen(traffic.config, traffic.kv, at) for at in ends)
        return rounds * steps * traffic.weights_bytes + rounds * twice // 2
