"""What the project promises about itself stays true."""

import importlib
import json
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest

import soloist
from soloist.bench import rows

ROOT = Path(__file__).parents[2]


def test_every_public_name_resolves():
    for name in soloist.__all__:
        assert getattr(soloist, name) is not None


def test_changelog_names_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == soloist.__version__


def test_shipped_weights_stay_small():
    models = ROOT / "src" / "soloist" / "models"
    assert sum(f.stat().st_size for f in models.rglob("*.safetensors")) <= 30_000_000


def test_tables_are_in_step_with_result_files(monkeypatch):
    tables = load_script("tables", monkeypatch)
    for document in tables.DOCUMENTS:
        assert tables.in_step(document), f"{document.name}: make tables"
    marks = [re.findall(r"<!-- table: (\S+) -->", d.read_text()) for d in tables.DOCUMENTS]
    shown = [name for names in marks for name in names]
    assert sorted(shown) == sorted(tables.TABLES), "each table stands in one document"


def test_a_table_follows_its_file(monkeypatch, tmp_path):
    tables = load_script("tables", monkeypatch)
    row = json.loads((ROOT / "benchmarks" / "results" / "etude-cpu.json").read_text())[0]
    row["decode_tokens_per_s"] = {"median": 1234.56, "min": 1000.0, "max": 2000.0}
    (tmp_path / "etude-cpu.json").write_text(json.dumps([row]))
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- table: etude-cpu -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    made = tables.written(document)
    assert made.startswith("before\n<!-- table: etude-cpu -->\n| engine |")
    assert "| soloist | 51.7 | 1,234.6 | 1,000.0 – 2,000.0 | 47% |" in made
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made
    assert not tables.in_step(document)


def test_a_figure_follows_its_file(monkeypatch, tmp_path):
    tables = load_script("tables", monkeypatch)
    rows = [{"shape": "a", "columns": 1, "ms": {"max": 1234.5}}, {"shape": "b", "columns": 1}]
    (tmp_path / "some.json").write_text(json.dumps(rows))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    document = tmp_path / "page.md"
    mark = "<!-- value: some.json shape=a columns=1 ms.max ,.0f -->"
    document.write_text(f"It takes {mark}9<!-- end --> ms.\n")
    assert tables.written(document) == f"It takes {mark}1,234<!-- end --> ms.\n"
    document.write_text("<!-- value: some.json columns=1 ms.max ,.0f -->9<!-- end -->")
    with pytest.raises(SystemExit, match="2 rows have columns=1"):
        tables.written(document)


def test_rivals_become_rows(monkeypatch, tmp_path, capsys):
    rivals = load_script("rivals", monkeypatch)
    line = {
        "engine": "other", "version": "1", "shape": "s", "weights": "bf16", "device": "d",
        "prompt_tokens": 5, "kept_tokens": 0, "new_tokens": 9, "ttft_ms": [3.0, 1.0, 2.0],
        "conditions": "alone",
        "decode_tokens_per_s": [10.0, 30.0, 20.0], "versions": {}, "command": "c", "date": "today",
    }  # fmt: skip
    printed, made = tmp_path / "printed", tmp_path / "made.json"
    printed.write_text(f"a library's message\n{json.dumps(line)}\n")
    assert rivals.main([str(printed), "-o", str(made)]) == 0
    (row,) = json.loads(made.read_text())
    assert row["bench"] == "rival"
    assert row["runs"] == 3
    assert row["decode_tokens_per_s"] == {"median": 20.0, "min": 10.0, "max": 30.0}
    for bad, told in (
        ("", "no line"),
        (f"{json.dumps(line)}\n" * 2, "measured twice: other, 1, s"),
        (json.dumps({**line, "speed": 1}), "a line has the fields"),
        (json.dumps({**line, "ttft_ms": []}), "no times"),
        (json.dumps({**line, "ttft_ms": [1.0]}), "1 times and 3 speeds"),
    ):
        printed.write_text(bad)
        with pytest.raises(SystemExit):
            rivals.main([str(printed), "-o", str(made)])
        assert told in capsys.readouterr().err
        assert json.loads(made.read_text()) == [row]
    printed.write_text(
        "\n".join(
            json.dumps({**line, "kept_tokens": kept, "decode_tokens_per_s": None})
            for kept in (0, 4)
        )
    )
    assert rivals.main([str(printed), "-o", str(made)]) == 0
    cold, kept = json.loads(made.read_text())
    assert (cold["kept_tokens"], kept["kept_tokens"]) == (0, 4)
    assert cold["decode_tokens_per_s"] is kept["decode_tokens_per_s"] is None


def test_a_rival_is_asked_for_new_prompts_and_for_prompts_it_kept(monkeypatch, capsys):
    vllm_decode = load_script("vllm_decode", monkeypatch)
    prompt, parsed, texts = vllm_decode.Prompt, vllm_decode.parsed, vllm_decode.texts
    assert parsed(["m"]).prompts == [prompt(128), prompt(2048)]
    asked = parsed(["m", "--prompt-tokens", "9", "--keep", "20:16", "20:8"])
    assert asked.prompts == [prompt(9), prompt(20, 16), prompt(20, 8)]
    assert parsed(["m", "--keep", "20:16"]).prompts == [prompt(20, 16)]
    for bad in (["--keep", "16:16"], ["--keep", "16"], ["--runs", "0"], ["--temperature", "-1"]):
        with pytest.raises(SystemExit):
            parsed(["m", *bad])
        assert bad[0] in capsys.readouterr().err

    opening = list(range(30))
    first, *runs = texts(prompt(20, 16), opening, 30, 3)
    assert first == opening[:16]
    assert [ids[:16] for ids in runs] == [first] * 4, "one run that is not timed, and three"
    assert [ids[17:] for ids in runs] == [opening[17:20]] * 4
    assert len({16, *(ids[16] for ids in runs)}) == 5
    new = texts(prompt(20), opening, 1000, 3)
    assert [len(ids) for ids in new] == [20] * 4
    assert len({tuple(ids) for ids in new}) == 4


def test_a_rival_has_room_for_two_long_prompts(monkeypatch):
    vllm_decode = load_script("vllm_decode", monkeypatch)
    shape = {
        name: vllm_decode.shape_config(name, "bf16", 4096)
        for name in ("llama-3.1-8b", "llama-3.2-1b", "laneformer-2b-as-llama")
    }
    assert {vllm_decode.kv_bytes(config, 4096) for config in shape.values()} == {2 << 30}
    assert vllm_decode.kv_bytes(shape["llama-3.1-8b"], 100_000) == 2 * 100_000 * (128 << 10)
    assert vllm_decode.kv_bytes(shape["llama-3.2-1b"], 100_000) == 2 * 100_000 * (32 << 10)
    longer = vllm_decode.shape_config("llama-3.1-8b", "fp8", 200_000)
    assert longer["max_position_embeddings"] == 200_000
    assert longer["quantization_config"]["quant_method"] == "fp8"


def test_a_rival_states_what_it_measured(monkeypatch):
    vllm_decode = load_script("vllm_decode", monkeypatch)
    runs = [vllm_decode.Run([1.0, 1.5, *(1.5 + i / 10 for i in range(1, 32))], 0)]
    told = vllm_decode.figures(runs, 32)
    assert told == {"ttft_ms": [500.0], "decode_tokens_per_s": [pytest.approx(10)]}
    first_only = vllm_decode.figures([vllm_decode.Run([1.0, 1.5], 0)], 1)
    assert first_only == {"ttft_ms": [500.0], "decode_tokens_per_s": None}
    assert "prefix caching off" in vllm_decode.conditions(0.0, caches=False)
    assert "prefix caching on" in vllm_decode.conditions(0.0, caches=True)
    assert "greedy" in vllm_decode.conditions(0.0, caches=False)
    assert "temperature 0.7" in vllm_decode.conditions(0.7, caches=False)


def test_recorded_rows_have_the_fields_that_are_described():
    kinds = {kind.__name__: kind for kind in get_args(rows.AnyRow)}
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        for row in json.loads(file.read_text()):
            kind = kinds[f"{row.get('bench', 'decode').title()}Row"]
            known = {field.name: field.default for field in fields(kind)}
            assert row.keys() <= known.keys(), file.name
            needed = {name for name, default in known.items() if default is MISSING}
            assert needed <= row.keys(), file.name


def test_every_recorded_file_has_its_commands(monkeypatch):
    suites = load_script("suites", monkeypatch)
    files = (
        {name: file.commands for suite in suites.SUITES.values() for name, file in suite.items()}
        | suites.RIVALS
        | suites.IN_TURN
    )
    for recorded in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert recorded.name in files, "benchmarks/suites.py says what makes it"
        found = {as_asked(row["command"]) for row in json.loads(recorded.read_text())}
        assert found == set(map(as_asked, files[recorded.name])), recorded.name


def as_asked(command):
    """Its words in any order, but for where rows go, the machine's device, and how often it ran."""
    words = shlex.split(command.removeprefix("soloist ").replace(" --json", ""))
    for option in {"-o", "--device", "--runs"} & set(words):
        at = words.index(option)
        del words[at : at + 2]
    return tuple(sorted(words))


def load_script(name, monkeypatch):
    """A module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(name)


def test_speeds_on_the_page_are_those_of_the_result_file():
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "etude-cpu.json").read_text())
    for row in rows:
        speed = row["decode_tokens_per_s"]
        cells = (
            f"| {row['engine']} | {row['ttft_ms']['median']:.1f} | {speed['median']:.1f} | "
            f"{speed['min']:.1f} – {speed['max']:.1f} | {row['mbu']:.0%} |"
        )
        assert cells in page


def test_gpu_speeds_on_the_page_are_those_of_the_result_file():
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    for row in rows:
        speed = row["decode_tokens_per_s"]
        if row["columns"] != 1 or row["prompt_tokens"] != 128:
            continue
        if row["start_position"] == 128:
            cells = (
                f"| {row['shape']} | {row['ttft_ms']['median']:.1f} | {speed['median']:,.0f} | "
                f"{speed['min']:,.0f} – {speed['max']:,.0f} | {row['mbu']:.0%} |"
            )
        else:
            cells = (
                f"| {row['shape']} | {row['start_position']:,} | {speed['median']:,.0f} | "
                f"{row['mbu']:.0%} |"
            )
        assert cells in page


def test_the_reference_is_twice_as_fast_as_transformers_in_the_recorded_run():
    rows = json.loads((ROOT / "benchmarks" / "results" / "etude-cpu.json").read_text())
    ours, *rivals = rows
    best = max(row["decode_tokens_per_s"]["median"] for row in rivals)
    assert ours["decode_tokens_per_s"]["median"] >= 2 * best
    assert ours["ttft_ms"]["median"] <= min(row["ttft_ms"]["median"] for row in rivals)
    assert len({row["output_ids_sha256"] for row in rows}) == 1


def test_the_readme_tells_what_an_install_downloads():
    told = " ".join((ROOT / "README.md").read_text().split())
    recorded = json.loads((ROOT / "benchmarks" / "install_sizes.json").read_text())
    for kind in ("cpu", "gpu"):
        packages, size = recorded[kind]["packages"], recorded[kind]["bytes"] / 1e6
        assert f"{packages} packages of {size:,.0f} MB" in told, "benchmarks/install_sizes.py"


def test_an_install_sizes_report_is_added_up(monkeypatch, tmp_path):
    sizes = load_script("install_sizes", monkeypatch)
    wheel = tmp_path / "a+b-1.whl"
    wheel.write_bytes(b"12345")
    url = wheel.as_uri()
    assert "%2B" in url
    items = [
        {"metadata": {"name": "a", "version": "1"}, "download_info": {"url": url}},
        {"metadata": {"name": "here", "version": "2"}, "download_info": {"url": tmp_path.as_uri()}},
    ]
    report = tmp_path / "report.json"
    facts = {"python_full_version": "3", "sys_platform": "linux", "platform_machine": "x86_64"}
    report.write_text(json.dumps({"install": items, "pip_version": "1", "environment": facts}))
    made = sizes.measured(report)
    assert (made["packages"], made["bytes"]) == (1, 5)  # a checkout is no download
    assert made["largest"]["a 1"] == 5
