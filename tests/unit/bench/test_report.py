"""The page holds what the files do, and asks for nothing from outside."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from soloist.bench.chart import Bar, bars, lines
from soloist.bench.report import report

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SERVE = {
    "bench": "serve", "engine": "<b>&", "shape": "m", "prefix": "warm", "max_tokens": 9,
    "ttft_ms": {"median": 5.0, "min": 4.0, "max": 6.0}, "decode_tokens_per_s": None,
    "token_ms": None, "gap_ms": {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0},
}  # fmt: skip


def figures(svg: str, tag: str) -> list[ET.Element]:
    return ET.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")  # noqa: S314 - our own


def plot(page: str, title: str) -> str:
    found = re.search(rf"<h2>{title}</h2>.*?\n<figure>(<svg.*?</svg>)", page, re.DOTALL)
    assert found is not None, title
    return found[1]


def test_recorded_results() -> None:
    files = {file.name: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    page = report(files)
    speed = f"{files['h200.json'][0]['decode_tokens_per_s']['median']:,.1f}"
    for words in (speed, "decode: speed against context", "97%", "startup: startup s"):
        assert words in page
    assert all(file in page for file in files)
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)  # noqa: S314


def test_rows_that_measure_the_same_are_side_by_side() -> None:
    rows = json.loads((RESULTS / "h200.json").read_text())
    page = report({"before.json": rows, "after.json": rows})
    bars_of = re.search(
        r"<h2>decode: decode tokens/s</h2>\n<figure>(<svg.*?</svg>)", page, re.DOTALL
    )
    assert bars_of is not None
    colours = [rect.attrib["class"] for rect in figures(bars_of[1], "rect")]
    assert colours == ["c0", "c1"] * len(rows)


def test_lines_against_context_are_those_of_one_file_and_number_of_gpus() -> None:
    row = {"engine": "x", "shape": "m", "columns": 1}
    rows = [
        row | {"start_position": at, "gpus": gpus, "decode_tokens_per_s": SERVE["ttft_ms"]}
        for at in (100, 200)
        for gpus in (1, 2)
    ]
    drawn = plot(report({"a.json": rows, "b.json": rows}), "decode: speed against context")
    assert len(figures(drawn, "circle")) == len(rows) * 2
    labels = {e.text for e in figures(drawn, "text")}
    assert {
        "x m · a.json",
        "x m on 2 GPUs · a.json",
        "x m · b.json",
        "x m on 2 GPUs · b.json",
    } < labels


def test_distributions_of_times() -> None:
    times = {"min": 1.0, "p10": 2.0, "p25": 3.0, "p50": 4.0, "p75": 5.0, "p90": 6.0, "p99": 8.0}
    page = report({"a.json": [SERVE | {"token_ms": {**times, "max": 400.0}}]})
    title = re.search(
        r"<h2>serve: m: time of a token</h2>\n<figure>(<svg.*?</svg>)", page, re.DOTALL
    )
    assert title is not None
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in figures(title[1], "circle")]
    assert len(points) == len(times)
    # From no time at all to 8 ms upwards, from none of them to 99 % to the right.
    assert points[6][0] - points[0][0] == pytest.approx(
        9.9 * (points[1][0] - points[0][0]), rel=0.01
    )
    assert points[0][1] - points[6][1] == pytest.approx(7 * (points[0][1] - points[1][1]), rel=0.02)
    assert "400.00 ms" in page, "the largest is in the table"


def test_steps_of_a_loop_and_where_lines_come_from() -> None:
    row = {
        "bench": "agent", "engine": "x", "shape": "m", "turns": 2, "asked_prompt_tokens": 9,
        "by_turn": [{"step_ms": 10.0}, {"step_ms": 30.0}],
    }  # fmt: skip
    page = report({"a.json": [row], "b.json": [row]})
    drawn = plot(page, "agent: time of each step")
    labels = [e.text for e in figures(drawn, "text")]
    assert "1. x m 2 turns from 9 · a.json" in labels
    assert "2. x m 2 turns from 9 · b.json" in labels
    heights = [300 - float(c.attrib["cy"]) for c in figures(drawn, "circle")]
    assert len(heights) == 4
    assert heights[1] > heights[0]


def test_clocks_stand_beside_conditions() -> None:
    clocks = {"sm_mhz": {"min": 1200, "median": 1900, "max": 1980}, "throttling": ["power"]}
    page = report({"a.json": [SERVE | {"clocks": clocks}]})
    assert "SM 1200 – 1980 MHz, throttled by power" in page


def test_a_server_without_decode_speed() -> None:
    page = report({"a.json": [SERVE]})
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page
    assert "serve: TTFT ms" in page
    assert "decode tokens/s</h2>" not in page
    assert "4.00 ms" in page


def test_nothing_to_draw() -> None:
    assert "0 rows" in report({"a.json": []})
    assert "<svg" not in report({"a.json": [{"bench": "accuracy", "engine": "x"}]})


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars([Bar("a", 10, 5, 20, "10", 0), Bar("b", 20, None, None, "20", 1)])
    short, long = (float(rect.attrib["width"]) for rect in figures(svg, "rect"))
    assert long == pytest.approx(2 * short)
    (spread,) = figures(svg, "line")
    assert float(spread.attrib["x2"]) - float(spread.attrib["x1"]) == pytest.approx(long * 0.75)


def test_points_are_where_their_values_are() -> None:
    svg = lines({"a": [(0, 0), (50, 100), (100, 50)]}, "x", "y")
    (x0, y0), (x1, y1), (x2, y2) = (
        (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in figures(svg, "circle")
    )
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2))
