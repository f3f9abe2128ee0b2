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


def test_recorded_results() -> None:
    files = {file.name: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    page = report(files)
    for words in ("1,708.4", "decode: speed against context", "98%", "startup: startup s"):
        assert words in page
    assert all(file in page for file in files)
    assert not re.findall(r"(?:src|href)=|@import|url\(|<script", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)  # noqa: S314


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
