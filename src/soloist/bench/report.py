"""`bench report`: result files as one HTML page with plots, which needs nothing else. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from soloist.bench.chart import NUM_COLOURS, Bar, bars, lines
from soloist.bench.compare import FIGURES, Figure, Json, conditions, describe, own_weights

_COLOURS = (
    "#3b6fb6", "#d9822b", "#4c9a5b", "#b5495b", "#7a63a8", "#8c6d4f", "#3f97a3", "#777777",
)  # fmt: skip
assert len(_COLOURS) == NUM_COLOURS, "one for each class of a chart"
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #ddd; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #16181c; --faint: #3a3d44; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
figure { margin: 0; overflow-x: auto; }
svg { width: 100%; min-width: 48rem; height: auto; font-size: 12px; fill: var(--ink); }
table { border-collapse: collapse; font-size: 12px; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid var(--faint); padding: 2px 8px; text-align: left;
  white-space: nowrap; }
.file { margin: 0; overflow-wrap: anywhere; }
.file span { display: inline-block; width: 12px; height: 12px; margin-right: 8px; }
.range { stroke: var(--ink); stroke-width: 1.5; } .grid { stroke: var(--faint); }
polyline { fill: none; }
"""
_LATENCIES = (
    ("token_ms", "time of a token"),
    ("gap_ms", "gaps between chunks"),
    ("step_ms", "time of a step"),
)
# The largest of many times says more about a machine's worst moment than about the rest: it is in
# the table, and not in the plot.
_SHARES = {"min": 0, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p99": 99}
# What judges and repeats a row.
_CONDITIONS = (
    "device", "url", "counting", "bandwidth_method", "clocks", "commit", "date", "command",
)  # fmt: skip


def report(files: Mapping[str, Sequence[Json]]) -> str:
    """The page.

    Args:
        files: name of each result file → its rows.
    """
    rows = _side_by_side([(name, row) for name, of_file in files.items() for row in of_file])
    colours = {name: i for i, name in enumerate(files)}
    parts = [
        f"<p>{len(rows)} rows. A line over a bar is the range of runs. Decode speed counts from "
        "the first token to the last. Colours of bars are those of files:</p>",
        *(
            f'<p class="file"><span class="b{i % NUM_COLOURS}"></span>{escape(name)}</p>'
            for name, i in colours.items()
        ),
    ]
    for kind, figures in FIGURES.items():
        for figure in figures:
            parts += _figure(rows, colours, kind, figure)
        parts += _against_context(rows, kind)
    parts += _mbu(rows, colours)
    parts += _latencies(rows) + _loops(rows)
    parts += [
        "<h2>Conditions</h2>",
        _table(
            ("file", "row", *_CONDITIONS),
            [(f, describe(row), *(_condition(row, c) for c in _CONDITIONS)) for f, row in rows],
        ),
    ]
    style = _STYLE + "".join(
        f".c{i} {{ fill: {colour}; }} .s{i} {{ stroke: {colour}; stroke-width: 2; }} "
        f".b{i} {{ background: {colour}; }}\n"
        for i, colour in enumerate(_COLOURS)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>soloist bench</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>\n<h1>soloist bench</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _side_by_side(rows: Sequence[tuple[str, Json]]) -> list[tuple[str, Json]]:
    """Rows that measure the same one after the other, in the order in which they first come."""
    groups: dict[object, list[tuple[str, Json]]] = {}
    for file, row in rows:
        groups.setdefault(conditions(row) or describe(row), []).append((file, row))
    return [item for group in groups.values() for item in group]


def _kind(row: Json) -> str:
    return str(row.get("bench", "decode"))


def _words(row: Json) -> str:
    return describe(row).partition(": ")[2]


def _figure(
    rows: Sequence[tuple[str, Json]], colours: Mapping[str, int], kind: str, figure: Figure
) -> list[str]:
    items = []
    for file, row in rows:
        spread = row.get(figure.field)
        if _kind(row) == kind and spread is not None:
            shown = f"{spread['median']:,.1f}"
            items.append(
                Bar(
                    _words(row), spread["median"], spread["min"], spread["max"],
                    shown, colours[file],
                )
            )  # fmt: skip
    return _plot(f"{kind}: {figure.unit}", bars(items)) if items else []


def _plot(title: str, svg: str, note: str = "") -> list[str]:
    return [f"<h2>{escape(title)}</h2>{note}", f"<figure>{svg}</figure>"]


def _against_context(rows: Sequence[tuple[str, Json]], kind: str) -> list[str]:
    """A line for all rows of one file that differ in context only."""
    series: dict[tuple[str, str], dict[float, float]] = {}
    for file, row in rows:
        speed = row.get("decode_tokens_per_s")
        start = row.get("start_position") or row.get("prompt_tokens")
        if _kind(row) != kind or speed is None or start is None or row.get("columns", 1) != 1:
            continue
        fields = ("engine", "shape", "precision", "device", "prefix")
        words = [str(row[field]) for field in fields if row.get(field)]
        words += [weights] if (weights := own_weights(row)) else []
        words += [f"on {row['gpus']} GPUs"] if row.get("gpus", 1) > 1 else []
        series.setdefault((" ".join(words), file), {})[start] = speed["median"]
    lasting = {name: sorted(points.items()) for name, points in series.items() if len(points) > 1}
    if not lasting:
        return []
    several = len({file for _, file in lasting}) > 1
    named = {
        name + (f" · {file}" if several else ""): points for (name, file), points in lasting.items()
    }
    title = f"{kind}: speed against context"
    return _plot(title, lines(named, "tokens before the first one made", "tokens/s"))


def _mbu(rows: Sequence[tuple[str, Json]], colours: Mapping[str, int]) -> list[str]:
    items = [
        Bar(_words(row), row["mbu"], None, None, f"{row['mbu']:.0%}", colours[file])
        for file, row in rows
        if row.get("mbu") is not None
    ]
    if not items:
        return []
    note = "<p>Share of the read bandwidth that was measured on the machine.</p>"
    most = max(1, *(bar.value for bar in items))
    return _plot("Memory-bandwidth utilisation", bars(items, most), note)


def _latencies(rows: Sequence[tuple[str, Json]]) -> list[str]:
    """Distributions of times, a plot for each model: how many of them are no longer than that."""
    parts = []
    for field, title in _LATENCIES:
        of_model: dict[str, list[tuple[str, Json]]] = {}
        for file, row in rows:
            if row.get(field) is not None:
                name = f"{_kind(row)}: {row.get('shape', '')}"
                of_model.setdefault(name, []).append((file, row))
        for name, found in of_model.items():
            series = {
                label: [
                    (share, row[field][at])
                    for at, share in _SHARES.items()
                    if row[field].get(at) is not None
                ]
                for label, (_, row) in zip(_labels(found), found, strict=True)
            }
            parts += _plot(f"{name}: {title}", lines(series, "% of them take no longer", "ms"))
            parts.append(_times(series, [row for _, row in found], field))
    return parts


def _loops(rows: Sequence[tuple[str, Json]]) -> list[str]:
    """How an agent's steps change while its context grows."""
    found = [(file, row) for file, row in rows if row.get("by_turn")]
    if not found:
        return []
    series = {
        label: [(number, turn["step_ms"]) for number, turn in enumerate(row["by_turn"], 1)]
        for label, (_, row) in zip(_labels(found), found, strict=True)
    }
    return _plot("agent: time of each step", lines(series, "step of the loop", "ms"))


def _labels(rows: Sequence[tuple[str, Json]]) -> list[str]:
    """Of rows in one plot, numbered; with their files where they are not of one."""
    several = len({file for file, _ in rows}) > 1
    return [
        f"{number}. {_words(row)}" + (f" · {file}" if several else "")
        for number, (file, row) in enumerate(rows, 1)
    ]


def _times(names: Iterable[str], rows: Sequence[Json], field: str) -> str:
    shares = ("p50", "p90", "p99", "max")
    return _table(
        ("", *shares),
        [
            (name, *(f"{row[field][share]:.2f} ms" for share in shares))
            for name, row in zip(names, rows, strict=True)
        ],
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{of_row}</tr>\n" for of_row in cells)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _condition(row: Json, name: str) -> str:
    value = row.get(name)
    if name != "clocks" or value is None:
        return "" if value is None else str(value)
    sm, reasons = value["sm_mhz"], ", ".join(value["throttling"])
    return f"SM {sm['min']:.0f} – {sm['max']:.0f} MHz, throttled by {reasons or 'nothing'}"
