"""What a token can be expected to take, from costs measured on one H200 machine.

    time of a token = max(bytes / (GPUs × read bandwidth), FLOPs / (GPUs × FLOP/s))
                      + layers × waiting of a layer

Weights stream while blocks compute, but what blocks exchange waits behind the stream, so streaming
and waiting add up. A layer has five exchanges; waiting is what they cost beyond the stream.

Sources, all from H200s:

- Read bandwidth: 4.44 of 4.8 TB/s. H200s that were at hand read 4.38 to 4.55
  (`benchmarks/results/h200.json`, `4-h200.json`), so up to 2 % more is possible; after work at the
  limit of their power two read 4.24 and 4.26.
- Waiting on one GPU: token times in `benchmarks/results/h200.json` less bytes / 4.44 TB/s, over
  layers: -0.1 to 3.8 µs over fifteen rows, 1.8 in the middle; 2.0 are taken. Small models with much
  context wait longest.
- Waiting on 2 and 4 GPUs: the seven rows of dense models in `benchmarks/results/2-h200.json` wait
  2.2 to 6.7 µs a layer, 3.4 in the middle, those in `benchmarks/results/4-h200.json` 4.1 to 8.7 µs
  a layer, 6.3 in the middle, by a kernel before. With 2.5 and 5.8 they are met within 4 % on
  2 GPUs and 7 % on 4, but for a 1B model at 2,048 positions, which makes 17 % fewer tokens on 2 and
  16 % on 4: it waits longest beside so few bytes (docs/experiments/).
- Waiting on 8 GPUs: a chain of multiplies and exchanges in the shape of a 2B model of 28 layers,
  hidden size 2,048, without attention and sampling, measured whole and as a stream alone, 339 and
  102 µs; the difference over 28 layers is the waiting. Wider models exchange more. It may well be
  less: the same chain waited 5.7 µs a layer on 2 GPUs.
- Waiting with lanes: three rows of each of these files wait 3.2 to 4.3 µs a layer on 2 GPUs, 3.6
  to 5.6 on 4.
- Waiting with experts: blocks know late which they read. On one GPU rows of qwen3-30b-a3b in bf16,
  FP8 and int4 (`benchmarks/results/h200-experts.json`) take 11.9 to 14.4 µs a layer more than its
  experts, head, keys and values at 4.44 TB/s; 12.8 are taken. On two GPUs it is 12.8 in bf16
  (`2-h200-experts.json`). What else a layer reads streams meanwhile, so waiting is that time less
  that stream's. Long keys and values come between that stream and the waiting: as many bytes as
  they have hide nothing. One row, after 32,000 positions, is behind that.
- Waiting of a step of several queries: 8 instead of 1 add 2.8 to 7.0 µs a layer there, and
  3.2 are taken; queries are padded to 8, so fewer cost the same. On several GPUs the same is
  taken.
- Keys and values in codes: `benchmarks/results/h200-kv.json`, one GPU. 8 bits are read as quickly
  as 16. 4 bits come at 0.7 of that, as turning them into numbers takes longer than reading them:
  rows after 128,000 positions are met within 4 %, that after 1,000,000 within 9 %.
- Reading a prompt: its FLOPs at 76 % of the peak, or its weights once at 80 % of the read
  bandwidth, 40 µs a layer and 0.5 ms at the start; times to first token in that file, of 128 and
  2,048 tokens, are within 15 % of it. Hosts differ: one prompt took 1.6 to 1.9 ms there.

Elsewhere the same share of bandwidth and the same waiting are assumptions: GPUs that reach each
other more slowly wait longer. So they are for models that Soloist does not run, whose layers are
taken to wait as dense ones do (what a router or a latent adds is not known), for lanes on 1 and
8 GPUs, and for experts on 4 and 8, where dense layers' difference is added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from soloist.planning.bounds import Kind, StepCost
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
class Waits:
    """What a layer's exchanges add to the stream; with experts, what they add to that of experts.

    Attributes:
        layer_s: number of GPUs → seconds.
        measured_on: numbers of GPUs; on others it is assumed.
    """

    layer_s: Mapping[int, float]
    measured_on: Sequence[int]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one kind of GPU.

    Attributes:
        hardware: its name.
        read_bandwidth: bytes a second that one GPU really reads.
        read_share: that, of the peak.
        waits: of each kind of layer.
        queries_wait_s: what several queries add to that.
        kv_read_shares: of the read bandwidth, by how keys and values are stored.
        sources: for people.
    """

    hardware: str
    read_bandwidth: float
    read_share: float
    waits: Mapping[Kind, Waits]
    queries_wait_s: float
    kv_read_shares: Mapping[str, float]
    sources: str


_CHAIN_LAYERS = 28
_DENSE_S = {1: 2.0e-6, 2: 2.5e-6, 4: 5.8e-6, 8: (339 - 102) * 1e-6 / _CHAIN_LAYERS}

MEASURED = Measured(
    hardware="H200",
    read_bandwidth=4.44e12,
    read_share=4.44 / 4.8,
    waits={
        Kind.DENSE: Waits(_DENSE_S, (1, 2, 4, 8)),
        Kind.LANES: Waits({1: 3.0e-6, 2: 3.0e-6, 4: 4.6e-6, 8: 4.6e-6}, (2, 4)),
        Kind.EXPERTS: Waits({1: 12.8e-6, 2: 12.8e-6, 4: 16.1e-6, 8: 18.8e-6}, (1, 2)),
        Kind.OTHER: Waits(_DENSE_S, ()),
    },
    queries_wait_s=3.2e-6,
    kv_read_shares={"int8": 1.0, "fp8": 1.0, "int4": 0.7},
    sources="1, 2 and 4 GPUs: benchmarks/results/h200.json, 2-h200.json and 4-h200.json; 8 GPUs: a "
    "chain of multiplies and exchanges in the shape of a 2B model, without attention "
    "(src/soloist/planning/expectation.py)",
)

# Of a GPU's peak and of its read bandwidth, while prompts are read; what a layer takes beside its
# work, and what a request takes beside its layers.
PROMPT_FLOPS_SHARE = 0.76
PROMPT_READ_SHARE = 0.8
PROMPT_LAYER_S = 40e-6
PROMPT_START_S = 0.5e-3


@dataclass(frozen=True, slots=True)
class Expectation:
    """Where the time of a token goes, in seconds.

    Attributes:
        stream_s: reading weights, keys and values.
        compute_s: multiplying at peak rate; None: the peak is not known.
        wait_s: exchanges.
    """

    stream_s: float
    compute_s: float | None
    wait_s: float

    @property
    def token_s(self) -> float:
        """The formula's sum."""
        return max(self.stream_s, self.compute_s or 0.0) + self.wait_s

    @property
    def wall(self) -> Wall:
        """The largest part."""
        parts = {
            Wall.BANDWIDTH: self.stream_s,
            Wall.EXCHANGES: self.wait_s,
            Wall.COMPUTE: self.compute_s or 0.0,
        }
        return max(parts, key=lambda wall: parts[wall])


def expect(cost: StepCost, hardware: Hardware, gpus: int, queries: int = 1) -> Expectation:
    """The formula above for 1, 2, 4 or 8 GPUs of this kind, and a step of `queries` queries."""
    of_layer = MEASURED.waits[cost.kind].layer_s[gpus]
    if queries > 1:
        of_layer += MEASURED.queries_wait_s
    compute = None if hardware.flops is None else cost.flops / (hardware.flops * gpus)
    kv_share = MEASURED.kv_read_shares[cost.kv_name] if cost.kv_name else 1.0
    rate = _read_rate(hardware) * gpus
    stream = (cost.weight_bytes + cost.kv_bytes / kv_share) / rate
    wait = cost.layers * of_layer
    if cost.kind is Kind.EXPERTS:
        least = cost.layers * MEASURED.waits[Kind.DENSE].layer_s[gpus]
        wait = max(least, wait - max(0, cost.certain_bytes - cost.kv_bytes) / rate)
    return Expectation(stream, compute, wait)


def is_measured(kind: Kind, hardware: Hardware, gpus: int, kv_name: str = "") -> bool:
    """Whether all that `expect` needs for 16-bit weights was measured, or some of it assumed."""
    if kv_name and gpus > 1:
        return False
    return hardware.name == MEASURED.hardware and gpus in MEASURED.waits[kind].measured_on


def prompt_s(cost: StepCost, layers: int, hardware: Hardware, gpus: int) -> float | None:
    """Seconds to read a prompt, to its first token; None where peak FLOP/s are not known.

    Args:
        cost: as `prompt_cost` tells it.
        layers: of the model.
        hardware: the kind of GPU.
        gpus: how many.
    """
    if hardware.flops is None:
        return None
    stream = cost.weight_bytes / (_read_rate(hardware) * gpus * PROMPT_READ_SHARE)
    compute = cost.flops / (hardware.flops * gpus * PROMPT_FLOPS_SHARE)
    return PROMPT_START_S + layers * PROMPT_LAYER_S + max(stream, compute)


def _read_rate(hardware: Hardware) -> float:
    """Bytes a second that one GPU reads."""
    if hardware.name == MEASURED.hardware:
        return MEASURED.read_bandwidth
    return hardware.bandwidth * MEASURED.read_share
