"""`soloist trace`: a traced round, or builds that leave something out, in words and tables."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from soloist.bench.picture import picture
from soloist.bench.shares import PhaseTraffic, Share, shares, traffic
from soloist.bench.timeline import PhaseTime, Timeline, read, times_by_phase, write
from soloist.cli.tables import show_columns, show_table, stored_words
from soloist.cli.terminal import print_json, status
from soloist.errors import SettingError, gigabytes
from soloist.files import write_text

if TYPE_CHECKING:
    from soloist.bench.trace import Ablations, Plan

_ABLATION_WORDS = {
    "none": "nothing: the whole kernel",
    "waits": "waits for other blocks (weight loads and multiplies remain)",
    "stream": "weight loads (exchanges, and multiplies of whatever is loaded, remain)",
    "multiply": "weight loads and multiplies (exchanges and attention remain)",
}


def trace_again(source: Path, drawing: Path | None, layer: int | None, *, as_json: bool) -> None:
    """Show, and draw, what a trace file holds."""
    _show(read(source), drawing, layer, as_json=as_json)


def trace_now(
    plan: "Plan", output: Path, drawing: Path | None, layer: int | None, *, as_json: bool
) -> None:
    """Trace a round, keep it and show it."""
    from soloist.bench.trace import trace

    made = trace(plan)
    write(output, made)
    status(f"{output}: open it in ui.perfetto.dev, or draw a layer with soloist trace --from")
    _show(made, drawing, layer, as_json=as_json)


def ablate_now(plan: "Plan", *, as_json: bool) -> None:
    """Time all builds and show them."""
    from soloist.bench.trace import ablate

    made = ablate(plan)
    if as_json:
        print_json({**asdict(made), "floor_us": made.floor_us})
    else:
        _show_ablations(made)


def _show(made: Timeline, drawing: Path | None, layer: int | None, *, as_json: bool) -> None:
    if layer is not None and drawing is None:
        raise SettingError("--layer", layer, "only with --picture")
    phases = times_by_phase(made.slices, len(made.sms))
    if drawing is not None:
        chosen = made.about.num_layers // 2 if layer is None else layer
        write_text(drawing, picture(made, chosen))
        status(f"{drawing}: layer {chosen} of {made.about.num_layers}")
    if as_json:
        print_json(
            {
                **asdict(made.about),
                "blocks": len(made.sms),
                "round_us": made.round_us,
                "mbu": made.mbu,
                "phases": [asdict(phase) for phase in phases],
                "shares": {share.name: share.us for share in shares(made, phases)},
                "traffic": [asdict(part) for part in traffic(made, phases)],
            }
        )
        return
    for line in words(made, phases):
        print(line)
    _show_phases(phases, traffic(made, phases), made.round_us)


def words(made: Timeline, phases: list[PhaseTime]) -> list[str]:
    """The trace in sentences."""
    a, total, whole = made.about, made.round_us, _together(phases)
    longest = max(phases, key=lambda phase: phase.waiting_us)
    return [
        f"{a.shape} · {stored_words(a.weights, a.precision)} · {a.device} · {len(made.sms)} blocks "
        f"· the token at position {a.position:,} · reads {gigabytes(a.streamed_bytes)} · bandwidth "
        f"{a.bandwidth_gb_per_s} GB/s",
        f"The traced round took {total:.1f} µs, MBU {made.mbu:.0%}; without time stamps a round "
        f"takes {a.untraced_us:.1f} µs.",
        "A block multiplies, or waits for memory to deliver, in "
        f"{whole.multiplying_us / total:.0%} of the time, waits for other blocks in "
        f"{whole.waiting_us / total:.0%}, and finishes results in "
        f"{whole.finishing_us / total:.0%}.",
        f"It waits longest in {longest.phase}: {longest.waiting_us:.1f} µs a round.",
        *_share_words(shares(made, phases)),
    ]


_WALLS = {
    "streaming": "loading weights takes longest: fewer bits a weight or faster memory would help",
    "exchanges": "blocks wait for each other; a larger model uses this GPU better",
    "multiplication": "multiplying takes longest, with the weights already loaded",
    "attention": "reading the context takes longest",
    "sampling": "choosing the token takes longest",
    "host": "launching the kernel and passing tokens to the host takes longest",
}


def _share_words(parts: list[Share]) -> list[str]:
    """A token's time in six words, the largest first, and which wall that is."""
    if not parts:
        return []
    total = sum(part.us for part in parts)
    ordered = sorted(parts, key=lambda part: -part.us)
    listed = ", ".join(f"{part.name} {part.us:.1f} µs ({part.us / total:.0%})" for part in ordered)
    wall = ordered[0].name
    return [f"A token's {total:.1f} µs go to: {listed}.", f"The wall is {wall}: {_WALLS[wall]}."]


def _together(phases: list[PhaseTime]) -> PhaseTime:
    return PhaseTime(
        "all",
        sum(phase.waiting_us for phase in phases),
        sum(phase.multiplying_us for phase in phases),
        sum(phase.finishing_us for phase in phases),
    )


def _show_phases(phases: list[PhaseTime], read: list[PhaseTraffic], total_us: float) -> None:
    """Phases in their order; MBU where a phase reads something."""
    by_phase = {part.phase: part for part in read}

    def of_traffic(phase: PhaseTime, shown: Callable[[PhaseTraffic], str]) -> str:
        part = by_phase.get(phase.phase)
        return "" if part is None else shown(part)

    show_columns(
        [*phases, _together(phases)],
        ("phase", lambda phase: phase.phase),
        ("waiting µs", lambda phase: f"{phase.waiting_us:.1f}"),
        ("multiplying µs", lambda phase: f"{phase.multiplying_us:.1f}"),
        ("finishing µs", lambda phase: f"{phase.finishing_us:.1f}"),
        ("together µs", lambda phase: f"{phase.total_us:.1f}"),
        ("of the round", lambda phase: f"{phase.total_us / total_us:.1%}"),
        ("reads", lambda phase: of_traffic(phase, lambda part: gigabytes(part.num_bytes))),
        ("MBU", lambda phase: of_traffic(phase, lambda part: f"{part.mbu:.0%}")),
    )
    if read:
        print("MBU of a phase: its bytes over its time; weights also load ahead, while blocks wait")


def _show_ablations(made: "Ablations") -> None:
    print(
        f"{made.shape} · {stored_words(made.weights, made.precision)} · {made.device} · around "
        f"position {made.position:,} · reads {gigabytes(made.streamed_bytes)} a token"
    )
    rows = [(_ABLATION_WORDS[b.leaves_out], f"{b.round_us:.1f}") for b in made.builds]
    floor = f"everything but reading, at the measured {made.bandwidth_gb_per_s} GB/s (computed)"
    show_table(("left out", "µs a token"), [*rows, (floor, f"{made.floor_us:.1f}")])
