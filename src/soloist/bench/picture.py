"""One layer of a traced round as an SVG picture: what every block did when, and the mean. Pure."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from soloist.bench.timeline import PhaseTime, Slice, Timeline, times_by_phase
from soloist.errors import SettingError
from soloist.megakernel.trace import Activity

# Fills that stand out on light and on dark pages; words take the page's own shade where it tells.
_FILLS: dict[Activity, str] = {
    "waiting": "#d9822b", "multiplying": "#3b82c4", "finishing": "#8f8f9d",
}  # fmt: skip
_LEGEND: dict[Activity, str] = {
    "waiting": "waiting for other blocks",
    "multiplying": "multiplying, or waiting for memory",
    "finishing": "finishing: sums, norms, publishing",
}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.small{font-size:11px}.line{stroke:#888;"
    "stroke-width:1}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)
_WIDTH, _LEFT, _RIGHT = 960, 118, 76
_TOP = 84
_BAR_HEIGHT, _BAR_STEP = 16, 24


def picture(made: Timeline, layer: int) -> str:
    """SVG text.

    Raises:
        SettingError: the model has no such layer.
    """
    slices = [s for s in made.slices if s.span.layer == layer]
    if not slices:
        raise SettingError("--layer", layer, f"0 … {made.about.num_layers - 1}")
    blocks, phases = len(made.sms), times_by_phase(slices, len(made.sms))
    height_of_blocks = max(3, round(400 / blocks)) * blocks
    below = _TOP + height_of_blocks + 54
    height = below + len(phases) * _BAR_STEP + 12
    a = made.about
    mean_us = sum(p.total_us for p in phases)
    title = (
        f"{a.shape} · {a.precision} · {a.device} · position {a.position:,} · layer {layer} of "
        f"{a.num_layers}: {mean_us:.1f} µs of a round of {made.round_us:,.0f} µs"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'width="{_WIDTH}" height="{height}" aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<text x="8" y="20">{escape(title)}</text>',
            *_legend(),
            *_blocks(slices, blocks, height_of_blocks),
            f'<text class="small" x="8" y="{below - 12}">mean of all blocks</text>',
            *_bars(phases, below),
            "</svg>",
            "",
        ]
    )


def _legend() -> list[str]:
    lines, x = [], 8
    for activity, words in _LEGEND.items():
        lines.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{_FILLS[activity]}"/>')
        lines.append(f'<text class="small" x="{x + 18}" y="44">{words}</text>')
        x += 40 + round(6.2 * len(words))
    return lines


def _blocks(slices: Sequence[Slice], num_blocks: int, height: int) -> list[str]:
    """A row for each block; one path a colour keeps the file small."""
    start = min(s.start_ns for s in slices)
    end = max(s.end_ns for s in slices)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start)
    row = height // num_blocks
    paths: dict[Activity, list[str]] = {activity: [] for activity in _FILLS}
    for s in slices:
        width = (s.end_ns - s.start_ns) * scale
        if width > 0:
            x, y = _LEFT + (s.start_ns - start) * scale, _TOP + s.block * row
            paths[s.span.activity].append(f"M{x:.1f} {y}h{width:.1f}v{row}h-{width:.1f}z")
    lines = [f'<path fill="{_FILLS[k]}" d="{"".join(path)}"/>' for k, path in paths.items() if path]
    lines.append(f'<text class="small" x="8" y="{_TOP + 10}">block 0</text>')
    lines.append(f'<text class="small" x="8" y="{_TOP + height}">block {num_blocks - 1}</text>')
    return [*lines, *_phase_starts(slices, start, scale), *_axis(end - start, scale, _TOP + height)]


def _phase_starts(slices: Sequence[Slice], start: int, scale: float) -> list[str]:
    """Names of phases where the middle block enters them."""
    lines, free = [], 0.0
    middle = [s for s in slices if s.block == max(s.block for s in slices) // 2]
    for phase, of_phase in groupby(middle, lambda s: s.span.phase):
        x = _LEFT + (next(of_phase).start_ns - start) * scale
        lines.append(f'<path class="line" d="M{x:.1f} {_TOP - 12}v10"/>')
        x = max(x, free)  # names of short phases would lie over each other
        lines.append(f'<text class="small" x="{x + 3:.1f}" y="{_TOP - 6}">{escape(phase)}</text>')
        free = x + 10 + 6.2 * len(phase)
    return lines


def _axis(length_ns: int, scale: float, y: int) -> list[str]:
    """Microseconds at round numbers."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 10**9) if length_ns / 1e3 / s <= 12)
    lines = []
    for us in range(0, int(length_ns / 1e3) + 1, step):
        x = _LEFT + us * 1e3 * scale
        lines.append(f'<path class="line" d="M{x:.1f} {y}v5"/>')
        unit = " µs" if us == 0 else ""
        lines.append(f'<text class="small" x="{x - 3:.1f}" y="{y + 17}">{us}{unit}</text>')
    return lines


def _bars(phases: Sequence[PhaseTime], top: int) -> list[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / max(p.total_us for p in phases)
    lines = []
    for i, phase in enumerate(phases):
        x, y = float(_LEFT), top + i * _BAR_STEP
        lines.append(f'<text x="8" y="{y + 13}">{escape(phase.phase)}</text>')
        times = (phase.waiting_us, phase.multiplying_us, phase.finishing_us)
        for fill, us in zip(_FILLS.values(), times, strict=True):
            size = f'width="{us * scale:.1f}" height="{_BAR_HEIGHT}"'
            lines.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{fill}"/>')
            x += us * scale
        label = f"{phase.total_us:.1f} µs"
        lines.append(f'<text class="small" x="{x + 6:.1f}" y="{y + 12}">{label}</text>')
    return lines
