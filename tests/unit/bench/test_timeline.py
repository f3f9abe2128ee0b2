"""Stamps become slices, a file, sums and a picture; without a GPU."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from plan.shapes import SMALL
from soloist.bench.picture import picture
from soloist.bench.timeline import About, Timeline, read, timeline, times_by_phase, write
from soloist.errors import SettingError, UserError
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.megakernel.trace import block_times, mark_names, num_words, stretches
from soloist.model.dtype import Dtype

PLAN = make_plan(SMALL, Dtype.BF16, TYPICAL["sm_90a"])
START_NS = 1_763_700_000_123_456_768  # a real clock: more digits than a float has
ABOUT = About(
    shape="small", device="a GPU", precision="bf16", position=160, num_layers=2,
    streamed_bytes=10**6, bandwidth_gb_per_s=1000.0, untraced_us=1.5, commit="abc",
    command="soloist trace", date="2026-11-21",
)  # fmt: skip


def words(block: int, ghz: float = 2.0) -> list[int]:
    """Block b starts b · 100 ns late; its stretch i takes 10 · (i % 7) ns, on its own clock."""
    zero_cycles = 10**12 + 12_345 * block
    at = [50 + 100 * block]
    for i in range(len(mark_names(PLAN)) - 1):
        at.append(at[-1] + 10 * (i % 7))
    end_ns = at[-1] + 400

    def cycles(ns: int) -> int:
        return zero_cycles + round(ns * ghz)

    return [
        START_NS, zero_cycles, *map(cycles, at), START_NS + end_ns, cycles(end_ns), 7 * block,
    ]  # fmt: skip


def made(num_blocks: int = 3) -> Timeline:
    blocks = [block_times(words(b, ghz=1.5 + 0.25 * b)) for b in range(num_blocks)]
    return timeline(blocks, stretches(PLAN), ABOUT)


def test_words_are_as_many_as_the_kernel_writes() -> None:
    assert len(words(0)) == num_words(PLAN)
    assert len(stretches(PLAN)) == len(mark_names(PLAN)) - 1
    for stretch, name in zip(stretches(PLAN), mark_names(PLAN)[1:], strict=True):
        assert name in (f"{stretch.phase} {stretch.name}", stretch.name)


def test_blocks_come_to_one_clock() -> None:
    for block, ghz in enumerate((1.5, 1.75, 1.98)):
        times = block_times(words(block, ghz))
        assert times.sm == 7 * block
        assert times.marks_ns[0] == pytest.approx(START_NS + 50 + 100 * block, abs=1)
        lengths = [b - a for a, b in pairwise(times.marks_ns)]
        assert lengths == pytest.approx([10 * (i % 7) for i in range(len(lengths))], abs=2)


def test_a_round_that_was_not_traced_is_noticed() -> None:
    with pytest.raises(ValueError, match="not traced"):
        block_times([0] * num_words(PLAN))


def test_slices_have_no_gaps_and_start_with_the_first_block() -> None:
    whole = made()
    for block in range(3):
        own = [s for s in whole.slices if s.block == block]
        assert [s.stretch for s in own] == stretches(PLAN)
        assert all(a.end_ns == b.start_ns for a, b in pairwise(own))
        assert own[0].start_ns == pytest.approx(100 * block, abs=1)
    assert whole.sms == (0, 7, 14)


def test_times_add_up() -> None:
    whole = made()
    phases = times_by_phase(whole.slices, 3)
    lengths = [10 * (i % 7) for i in range(len(stretches(PLAN)))]
    assert whole.round_us == pytest.approx(sum(lengths) / 1e3, rel=0.01)
    assert sum(p.total_us for p in phases) == pytest.approx(whole.round_us)
    assert whole.mbu == pytest.approx(ABOUT.streamed_bytes / whole.round_us / 1e6)
    assert [p.phase for p in phases] == [
        "embed", "qkv", "attention", "output", "gate_up", "down", "head", "choose", "conclude",
    ]  # fmt: skip
    down = next(p for p in phases if p.phase == "down")
    wanted = {"waiting": 0, "multiplying": 0, "finishing": 0}
    for stretch, ns in zip(stretches(PLAN), lengths, strict=True):
        if stretch.phase == "down":
            wanted[stretch.activity] += ns
    assert down.waiting_us == pytest.approx(wanted["waiting"] / 1e3, abs=0.01)
    assert down.multiplying_us == pytest.approx(wanted["multiplying"] / 1e3, abs=0.01)
    assert down.finishing_us == pytest.approx(wanted["finishing"] / 1e3, abs=0.01)


def test_the_file_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "trace.json"
    write(file, made())
    assert read(file) == made()


def test_the_file_nests_as_perfetto_wants(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write(file, made())
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "block 0 on SM 0", 1: "block 1 on SM 7", 2: "block 2 on SM 14"}
    for block in names:
        open_until: list[int] = []
        for e in (e for e in events if e["ph"] == "X" and e["tid"] == block):
            start, end = round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)
            depth = {"layer": 0, "phase": 1}.get(e["cat"], 2)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert all(end <= parent for parent in open_until), f"{e} ends after what it is in"
            assert len(open_until) <= depth
            open_until.append(end)
    layers = [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "layer"]
    assert layers == ["layer 0", "layer 1"] * 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"soloist": {}, "traceEvents": []}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(UserError, match="no trace"):
        read(file)


def test_the_picture_shows_every_block_and_phase() -> None:
    root = ET.fromstring(picture(made(40), 1))  # noqa: S314 - our own text
    texts = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    for phase in ("qkv", "attention", "output", "gate_up", "down"):
        assert texts.count(phase) == 2, "over the blocks and beside its bar"
    assert "small · bf16 · a GPU · position 160 · layer 1 of 2" in texts[0]
    assert "block 39" in texts
    paths = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if "fill" in e.attrib]
    assert len(paths) == 3
    drawn = sum(path.attrib["d"].count("M") for path in paths)
    slices = [s for s in made(40).slices if s.stretch.layer == 1 and s.end_ns > s.start_ns]
    assert drawn == len(slices)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(SettingError, match="0 … 1"):
        picture(made(), 2)
