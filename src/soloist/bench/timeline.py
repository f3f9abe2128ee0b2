"""A traced round as slices of time: from stamps, to and from a file, and summed by phase. Pure.

The file is Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show: a
track for each block, and in it layers, in them phases, in them spans. It holds all that a table
or a picture needs, so both can be made again where there is no GPU.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast, get_args

from soloist.errors import UserError
from soloist.files import write_text
from soloist.megakernel.trace import Activity, BlockTimes, Span

_ACTIVITIES = get_args(Activity)


@dataclass(frozen=True, slots=True)
class About:
    """Which round was traced, under which conditions.

    Attributes:
        shape: name of the model.
        device: name of the GPU.
        precision: of weights and KV cache.
        position: of the round's token.
        num_layers: of the model.
        streamed_bytes: weights and KV that the round has to read, on this GPU.
        bandwidth_gb_per_s: measured read bandwidth of the device.
        untraced_us: a round of the kernel without time stamps, median.
        commit, command, date: where the file comes from.
        phase_bytes: of `streamed_bytes`, those of each phase, over all layers; norms and biases are
            in none. Empty in files of older versions, like the next two.
        resident_us: what multiplying takes in each phase of a round without the stream, mean over
            blocks.
        host_us: a token of a request takes so much longer than a round: launching and passing it
            on, over as many tokens as the launch has rounds.
        weights: how matrices are stored, as result files call it; empty in older files, where it
            is `precision`.
    """

    shape: str
    device: str
    precision: str
    position: int
    num_layers: int
    streamed_bytes: int
    bandwidth_gb_per_s: float
    untraced_us: float
    commit: str
    command: str
    date: str
    phase_bytes: dict[str, int] = field(default_factory=dict)
    resident_us: dict[str, float] = field(default_factory=dict)
    host_us: float | None = None
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Slice:
    """One span of one block; times count from the first block's start, in ns."""

    block: int
    span: Span
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One round of all blocks.

    Attributes:
        sms: where each block ran.
        slices: of every block in turn, in order, without gaps.
    """

    about: About
    sms: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def round_us(self) -> float:
        """From a block's first mark to its last, mean over blocks."""
        return sum(s.end_ns - s.start_ns for s in self.slices) / len(self.sms) / 1e3

    @property
    def mbu(self) -> float:
        """Bytes of the round over its time, as a share of the bandwidth."""
        return self.about.streamed_bytes / self.round_us / 1e3 / self.about.bandwidth_gb_per_s


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of all layers together: mean over blocks, in us."""

    phase: str
    waiting_us: float
    multiplying_us: float
    finishing_us: float

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.waiting_us + self.multiplying_us + self.finishing_us


def timeline(blocks: Sequence[BlockTimes], between: Sequence[Span], about: About) -> Timeline:
    """Marks of all blocks, and what lies between each two of them."""
    origin = min(block.marks_ns[0] for block in blocks)
    slices = [
        Slice(number, span, start - origin, end - origin)
        for number, block in enumerate(blocks)
        for span, (start, end) in zip(between, pairwise(block.marks_ns), strict=True)
    ]
    return Timeline(about, tuple(block.sm for block in blocks), tuple(slices))


def times_by_phase(slices: Iterable[Slice], num_blocks: int) -> list[PhaseTime]:
    """Where the time went, in the order in which phases come."""
    sums: dict[str, dict[Activity, int]] = {}
    for s in slices:
        of_phase = sums.setdefault(s.span.phase, dict.fromkeys(_ACTIVITIES, 0))
        of_phase[s.span.activity] += s.end_ns - s.start_ns
    return [
        PhaseTime(phase, *(of_phase[activity] / num_blocks / 1e3 for activity in _ACTIVITIES))
        for phase, of_phase in sums.items()
    ]


def write(file: Path, made: Timeline) -> None:
    """Write a trace file, replacing it.

    Raises:
        NotWritten: it cannot be written.
    """
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(made))
    about = json.dumps({**asdict(made.about), "sms": made.sms})
    text = f'{{"displayTimeUnit":"ns","soloist":{about},\n"traceEvents":[\n{events}\n]}}\n'
    write_text(file, text)


def read(file: Path) -> Timeline:
    """Read back what `write` wrote.

    Raises:
        UserError: the file is not there, or not such a file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        facts = content["soloist"]
        sms = tuple(facts.pop("sms"))
        slices = [_slice(event) for event in content["traceEvents"] if "stretch" in event["args"]]
        return Timeline(About(**facts), sms, tuple(slices))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{file} cannot be read: {reason}", _WHERE_FROM) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a trace file of Soloist", _WHERE_FROM) from error


_WHERE_FROM = "make a trace on a machine with a GPU: soloist trace MODEL --output trace.json"


def _events(made: Timeline) -> Iterable[dict[str, Any]]:
    for block, sm in enumerate(made.sms):
        name = f"block {block} on SM {sm}"
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": block, "args": {"name": name}}
    for _, of_block in groupby(made.slices, lambda s: s.block):
        for layer, of_layer in groupby(of_block, lambda s: s.span.layer):
            in_layer = list(of_layer)
            if layer is not None:
                yield _event(f"layer {layer}", "layer", in_layer, {})
            for phase, of_phase in groupby(in_layer, lambda s: s.span.phase):
                in_phase = list(of_phase)
                yield _event(phase, "phase", in_phase, {})
                for s in in_phase:
                    args = {"stretch": s.span.name, "phase": phase, "layer": layer}
                    yield _event(s.span.name, s.span.activity, [s], args)


def _event(
    name: str, category: str, slices: Sequence[Slice], args: Mapping[str, object]
) -> dict[str, Any]:
    first, last = slices[0], slices[-1]
    return {
        "ph": "X", "name": name, "cat": category, "pid": 0, "tid": first.block,
        "ts": first.start_ns / 1e3, "dur": (last.end_ns - first.start_ns) / 1e3, "args": args,
    }  # fmt: skip


def _slice(event: dict[str, Any]) -> Slice:
    args, activity = event["args"], event["cat"]
    if activity not in _ACTIVITIES:
        raise ValueError(activity)
    span = Span(args["layer"], args["phase"], args["stretch"], cast("Activity", activity))
    start_ns = round(event["ts"] * 1e3)
    return Slice(event["tid"], span, start_ns, start_ns + round(event["dur"] * 1e3))
