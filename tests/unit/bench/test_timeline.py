"""Stamps become slices, a file, sums and a picture; without a GPU."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from plan.shapes import MIXTURE, SMALL
from soloist.bench.picture import picture
from soloist.bench.shares import shares, traffic
from soloist.bench.timeline import About, Timeline, read, timeline, times_by_phase, write
from soloist.cli import tracing
from soloist.errors import SettingError, UserError
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.megakernel.trace import (
    block_times,
    chosen_experts,
    mark_names,
    num_time_words,
    num_words,
    spans,
)
from soloist.model.dtype import Dtype
from soloist.model.families import read_config

PLAN = make_plan(SMALL, Dtype.BF16, TYPICAL["sm_90a"])
START_NS = 1_763_700_000_123_456_768  # a real clock: more digits than a float has
ABOUT = About(
    shape="small", device="a GPU", precision="bf16", position=160, num_layers=2,
    streamed_bytes=10**6, bandwidth_gb_per_s=1000.0, untraced_us=1.5, commit="abc",
    command="soloist trace", date="2026-11-21",
)  # fmt: skip


def words(block: int, ghz: float = 2.0) -> list[int]:
    """Block b starts b · 100 ns late; its span i takes 10 · (i % 7) ns, on its own clock."""
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
    blocks = [block_times(PLAN, words(b, ghz=1.5 + 0.25 * b)) for b in range(num_blocks)]
    return timeline(blocks, spans(PLAN), ABOUT)


def test_words_are_as_many_as_the_kernel_writes() -> None:
    assert len(words(0)) == num_words(PLAN)
    assert len(spans(PLAN)) == len(mark_names(PLAN)) - 1
    for span, name in zip(spans(PLAN), mark_names(PLAN)[1:], strict=True):
        assert name in (f"{span.phase} {span.name}", span.name)


def test_blocks_come_to_one_clock() -> None:
    for block, ghz in enumerate((1.5, 1.75, 1.98)):
        times = block_times(PLAN, words(block, ghz))
        assert times.sm == 7 * block
        assert times.marks_ns[0] == pytest.approx(START_NS + 50 + 100 * block, abs=1)
        lengths = [b - a for a, b in pairwise(times.marks_ns)]
        assert lengths == pytest.approx([10 * (i % 7) for i in range(len(lengths))], abs=2)


def test_a_round_that_was_not_traced_is_noticed() -> None:
    with pytest.raises(ValueError, match="not traced"):
        block_times(PLAN, [0] * num_words(PLAN))


def test_a_mixtures_trace_ends_with_the_experts_of_each_layer() -> None:
    plan = make_plan(read_config(MIXTURE), Dtype.BF16, TYPICAL["sm_90a"])
    layers = plan.model.num_layers
    assert num_words(plan) == num_time_words(plan) + layers
    assert num_words(PLAN) == num_time_words(PLAN)
    marks = len(mark_names(plan))
    told = [100, 200, *range(1000, 1000 + marks), 300, 400, 5, 0, *range(7, 6 + layers)]
    assert chosen_experts(plan, told) == [*range(7, 6 + layers)], "the first layer has none"
    times = block_times(plan, told)
    assert (times.sm, len(times.marks_ns)) == (5, marks)
    assert chosen_experts(PLAN, [0] * num_words(PLAN)) == []


def test_slices_have_no_gaps_and_start_with_the_first_block() -> None:
    whole = made()
    for block in range(3):
        own = [s for s in whole.slices if s.block == block]
        assert [s.span for s in own] == spans(PLAN)
        assert all(a.end_ns == b.start_ns for a, b in pairwise(own))
        assert own[0].start_ns == pytest.approx(100 * block, abs=1)
    assert whole.sms == (0, 7, 14)


def test_times_add_up() -> None:
    whole = made()
    phases = times_by_phase(whole.slices, 3)
    lengths = [10 * (i % 7) for i in range(len(spans(PLAN)))]
    assert whole.round_us == pytest.approx(sum(lengths) / 1e3, rel=0.01)
    assert sum(p.total_us for p in phases) == pytest.approx(whole.round_us)
    assert whole.mbu == pytest.approx(ABOUT.streamed_bytes / whole.round_us / 1e6)
    assert [p.phase for p in phases] == [
        "embed", "qkv", "attention", "output", "gate_up", "down", "head", "choose", "conclude",
    ]  # fmt: skip
    down = next(p for p in phases if p.phase == "down")
    wanted = {"waiting": 0, "multiplying": 0, "finishing": 0}
    for span, ns in zip(spans(PLAN), lengths, strict=True):
        if span.phase == "down":
            wanted[span.activity] += ns
    assert down.waiting_us == pytest.approx(wanted["waiting"] / 1e3, abs=0.01)
    assert down.multiplying_us == pytest.approx(wanted["multiplying"] / 1e3, abs=0.01)
    assert down.finishing_us == pytest.approx(wanted["finishing"] / 1e3, abs=0.01)


def told(num_blocks: int = 3) -> Timeline:
    """With all that words need: multiplying takes half as long without the stream."""
    phases = times_by_phase(made(num_blocks).slices, num_blocks)
    resident = {p.phase: p.multiplying_us / 2 for p in phases}
    read = {"qkv": 300_000, "attention": 1000, "head": 600_000}
    about = replace(ABOUT, phase_bytes=read, resident_us=resident, host_us=0.25)
    return replace(made(num_blocks), about=about)


def test_shares_add_up_and_tell_streaming_from_multiplying() -> None:
    whole = told()
    phases = times_by_phase(whole.slices, 3)
    parts = {share.name: share.us for share in shares(whole, phases)}
    assert list(parts) == [
        "streaming", "exchanges", "multiplication", "attention", "sampling", "host",
    ]  # fmt: skip
    assert sum(parts.values()) == pytest.approx(whole.round_us + 0.25)
    assert parts["streaming"] == pytest.approx(sum(p.multiplying_us for p in phases) / 2)
    assert parts["exchanges"] == pytest.approx(sum(p.waiting_us for p in phases))
    attention = next(p for p in phases if p.phase == "attention")
    assert parts["attention"] == pytest.approx(
        attention.multiplying_us / 2 + attention.finishing_us
    )
    chosen = [p for p in phases if p.phase in ("choose", "conclude")]
    assert parts["sampling"] == pytest.approx(
        sum(p.multiplying_us / 2 + p.finishing_us for p in chosen)
    )
    assert parts["host"] == 0.25


def test_multiplying_never_takes_longer_alone() -> None:
    whole = told()
    resident = {name: 4 * us for name, us in whole.about.resident_us.items()}
    slow = replace(whole, about=replace(whole.about, resident_us=resident))
    parts = {s.name: s.us for s in shares(slow, times_by_phase(slow.slices, 3))}
    assert parts["streaming"] == 0
    assert sum(parts.values()) == pytest.approx(whole.round_us + 0.25)


def test_utilisation_of_memory_by_phase() -> None:
    whole = told()
    phases = {p.phase: p for p in times_by_phase(whole.slices, 3)}
    found = traffic(whole, list(phases.values()))
    assert [part.phase for part in found] == ["qkv", "attention", "head"]
    assert found[0].mbu == pytest.approx(300_000 / phases["qkv"].total_us / 1e3 / 1000)


def test_older_files_tell_no_shares(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write(file, made())
    content = json.loads(file.read_text())
    for name in ("phase_bytes", "resident_us", "host_us"):
        del content["soloist"][name]
    file.write_text(json.dumps(content))
    old = read(file)
    phases = times_by_phase(old.slices, 3)
    assert (shares(old, phases), traffic(old, phases)) == ([], [])
    assert not any("go to" in line for line in tracing.words(old, phases))


def test_words_name_the_wall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    write(file, told())
    tracing.trace_again(file, None, None, as_json=False)
    shown = capsys.readouterr().out
    largest = max(shares(told(), times_by_phase(told().slices, 3)), key=lambda share: share.us)
    assert f"The wall is {largest.name}" in shown
    for words in ("streaming", "exchanges", "multiplication", "attention", "sampling", "host 0.2"):
        assert words in shown
    qkv = next(line for line in shown.splitlines() if line.startswith("qkv"))
    assert qkv.endswith("%")
    assert "300 kB" in qkv


def test_the_file_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "trace.json"
    write(file, made())
    assert read(file) == made()
    write(file, told())
    assert read(file) == told()


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
    with pytest.raises(UserError, match="not a trace"):
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
    slices = [s for s in made(40).slices if s.span.layer == 1 and s.end_ns > s.start_ns]
    assert drawn == len(slices)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(SettingError, match="0 … 1"):
        picture(made(), 2)
