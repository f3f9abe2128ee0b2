"""What a token can be expected to take, from costs measured on one H200 machine.

    time of a token = max(bytes / (GPUs × read bandwidth), FLOPs / (GPUs × FLOP/s))
                      + layers × waiting of a layer

Weights stream while blocks compute, but what blocks exchange waits behind the stream, so streaming
and waiting add up. A layer has five exchanges; waiting is what they cost beyond the stream.

Sources, all from H200s:

- Read bandwidth: 4.44 of 4.8 TB/s, the machine of `benchmarks/results/h200.json`. Other H200s
  read at up to 4.58, so up to 3 % more is possible.
- Waiting on one GPU: token times in `benchmarks/results/h200.json` less bytes / 4.44 TB/s, over
  layers: 1.3 to 5.3 µs over fifteen rows, 2.9 in the middle. Contexts of some 2,000 positions
  wait longest, where a few blocks of a KV head read all of its cache.
- Waiting on several GPUs: a chain of multiplies and exchanges in the shape of a 2B model of 28
  layers, hidden size 2,048, without attention and sampling, measured whole and as a stream alone.
  In µs: 574 and 414 on 2 GPUs, 402 and 205 on 4, 339 and 102 on 8; the difference over 28 layers
  is the waiting. Wider models exchange more.

Elsewhere the same share of bandwidth is an assumption, and waiting is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from soloist.planning.bounds import StepCost
from soloist.planning.hardware import Hardware

FORMULA = (
    "time of a token = max(bytes / (GPUs × read bandwidth), FLOPs / (GPUs × FLOP/s)) "
    "+ layers × waiting of a layer"
)


class Wall(Enum):
    """What keeps a model from going faster, or from going at all."""

    CAPACITY = "capacity"
    BANDWIDTH = "bandwidth"
    EXCHANGES = "exchanges"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one kind of GPU.

    Attributes:
        read_bandwidth: bytes a second that one GPU really reads.
        layer_wait_s: number of GPUs → seconds that a layer's five exchanges add to the stream.
        sources: for people.
    """

    read_bandwidth: float
    layer_wait_s: Mapping[int, float]
    sources: str


_CHAIN_LAYERS = 28

MEASURED = {
    "H200": Measured(
        read_bandwidth=4.44e12,
        layer_wait_s={
            1: 3.0e-6,
            2: (574 - 414) * 1e-6 / _CHAIN_LAYERS,
            4: (402 - 205) * 1e-6 / _CHAIN_LAYERS,
            8: (339 - 102) * 1e-6 / _CHAIN_LAYERS,
        },
        sources="1 GPU: benchmarks/results/h200.json; 2, 4 and 8 GPUs: a chain of multiplies and "
        "exchanges in the shape of a 2B model, without attention "
        "(src/soloist/planning/expectation.py)",
    )
}

READ_SHARE = 4.44 / 4.8


@dataclass(frozen=True, slots=True)
class Expectation:
    """Where the time of a token goes, in seconds.

    Attributes:
        stream_s: reading weights, keys and values.
        compute_s: multiplying at peak rate; None: the peak is not known.
        wait_s: exchanges; None: not measured on this hardware or for such a model.
    """

    stream_s: float
    compute_s: float | None
    wait_s: float | None

    @property
    def token_s(self) -> float:
        """The sum; without waiting, what a token takes at least."""
        return max(self.stream_s, self.compute_s or 0.0) + (self.wait_s or 0.0)

    @property
    def wall(self) -> Wall:
        """The largest part."""
        parts = {
            Wall.BANDWIDTH: self.stream_s,
            Wall.EXCHANGES: self.wait_s or 0.0,
            Wall.COMPUTE: self.compute_s or 0.0,
        }
        return max(parts, key=lambda wall: parts[wall])


def expect(cost: StepCost, hardware: Hardware, gpus: int) -> Expectation:
    """The formula above for `gpus` GPUs of this kind."""
    measured = MEASURED.get(hardware.name)
    read = measured.read_bandwidth if measured else hardware.bandwidth * READ_SHARE
    wait = None
    if measured and cost.exchanging_layers is not None and gpus in measured.layer_wait_s:
        wait = cost.exchanging_layers * measured.layer_wait_s[gpus]
    compute = None if hardware.flops is None else cost.flops / (hardware.flops * gpus)
    return Expectation(cost.num_bytes / (read * gpus), compute, wait)
