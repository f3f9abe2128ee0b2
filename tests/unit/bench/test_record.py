"""Recording by one command: what is there stays, a file is whole or as it was."""

import importlib
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUN = subprocess.run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """The script on a suite of two files, and a machine where the command `bad` fails."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    record = importlib.import_module("record")
    suites = importlib.import_module("suites")
    made: list[str] = []

    def run(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess:
        if command[1].endswith(".py"):
            made.append(" ".join(command[1:]))
            (cwd / command[2]).mkdir(parents=True)
            return subprocess.CompletedProcess(command, 0, "1.0 s\n", "")
        words = command[command.index("soloist") + 1 :]
        made.append(" ".join(words))
        rows = json.dumps([{"command": words[1], "number": len(made)}])
        return subprocess.CompletedProcess(command, 3 * (words[1] == "bad"), rows, "error: no GPU")

    monkeypatch.setattr(record.subprocess, "run", run)
    files = {
        "a.json": suites.File(("bench one --name 'two words'", "bench two")),
        "b.json": suites.File(("bench three", "bench bad")),
    }
    monkeypatch.setattr(record, "SUITES", {"here": files})
    record.made = made
    return record


def test_a_run_that_stopped_goes_on(script, tmp_path: Path, capsys) -> None:
    (tmp_path / "b.json").write_text("[1]\n")
    parts = ["here", "--parts", str(tmp_path / "parts"), "--results", str(tmp_path)]
    assert script.main(parts) == 1
    assert script.made[0] == "bench one --name two words --json"
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [row["command"] for row in rows] == ["one", "two"]
    assert (tmp_path / "b.json").read_text() == "[1]\n", "not all of it was measured"
    shown = capsys.readouterr().out
    assert "b.json: not all of its commands succeeded" in shown
    assert "error: no GPU" in shown
    assert script.main(parts) == 1
    assert script.made[4:] == ["bench bad --json"], "only what is missing runs again"
    assert script.main([*parts, "--only", "a.json"]) == 0
    with pytest.raises(SystemExit):
        script.main([*parts, "--only", "c.json"])


def test_a_service_that_lacks_a_package(script) -> None:
    service = script.Service("x serve", 1, "x", "serve", needs=("no_such_package",))
    with pytest.raises(SystemExit, match="pip install no_such_package"):
        script._running(service).__enter__()


def test_a_service_whose_port_is_taken(script) -> None:
    with socket.create_server(("localhost", 0)) as other:
        service = script.Service("x serve", other.getsockname()[1], "x", "serve")
        with pytest.raises(SystemExit, match="is taken"):
            script._running(service).__enter__()


def test_quantised_folders_are_made_before_they_are_measured(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{script.QUANTIZED}/int4/llama-3.2-1b"
    commands = (f"bench decode {folder}", f"bench accuracy {folder}", "bench two")
    monkeypatch.setattr(script, "SUITES", {"here": {"c.json": script.File(commands)}})
    monkeypatch.setattr(script, "ROOT", tmp_path)
    parts = ["here", "--parts", str(tmp_path / "parts"), "--results", str(tmp_path)]
    assert script.main(parts) == 0
    assert script.made[0] == f"benchmarks/quantized_folders.py {folder}"
    assert len(script.made) == 4
    (tmp_path / "c.json").unlink()
    again = ["here", "--parts", str(tmp_path / "others"), "--results", str(tmp_path)]
    assert script.main([*again, "--delete-folders"]) == 0
    assert script.made[4:] == [f"{command} --json" for command in commands], "it was there"
    assert not (tmp_path / folder).exists()


def test_a_servers_folder_is_made_before_it_starts_and_stays_while_it_runs(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{script.QUANTIZED}/bf16/llama-3.2-1b"
    service = script.Service("x serve", 1, "x", f"serve {folder}")
    files = {"c.json": script.File(("bench two",), (service,))}
    there = []

    @contextmanager
    def running(_: object) -> Iterator[None]:
        there.append((tmp_path / folder).exists())
        yield
        there.append((tmp_path / folder).exists())

    monkeypatch.setattr(script, "SUITES", {"here": files})
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "_running", running)
    parts = ["here", "--parts", str(tmp_path / "parts"), "--results", str(tmp_path)]
    assert script.main([*parts, "--delete-folders"]) == 0
    assert there == [True, True]
    assert not (tmp_path / folder).exists()
    assert script.main(parts) == 0, "all was measured: no server is needed"
    assert there == [True, True]


def test_a_folder_stays_until_the_last_command_that_needs_it(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    first, second = (f"{script.QUANTIZED}/fp8/{name}" for name in ("a", "b"))
    commands = [f"x {first}", f"y {second}", f"z {first}"]
    folders = script.Folders(commands, lambda *_: None, deletes=True)
    there = []
    for folder in (first, second):
        (tmp_path / folder).mkdir(parents=True)
    for command in commands:
        with folders.of(command):
            pass
        there.append([(tmp_path / folder).exists() for folder in (first, second)])
    assert there == [[True, True], [True, False], [False, False]]


def test_every_quantised_folder_of_a_suite_can_be_made(script) -> None:
    importlib.reload(script)
    folders = importlib.import_module("quantized_folders")
    words = {
        word
        for suite in script.SUITES.values()
        for file in suite.values()
        for command in file.commands
        for word in command.split()
        if word.startswith(script.QUANTIZED)
    }
    assert words
    for place in map(Path, words):
        assert place.parent.name in {*folders.FORMS, *folders.GGUF}
        assert (folders.SHAPES / f"{place.name.removesuffix(folders.OUTLIERS)}.json").exists()


def test_commands_in_this_process(script, tmp_path: Path, monkeypatch, capsys) -> None:
    """Rows, and the command they tell of, are those of a process of its own; so are errors."""
    good, bad = "bench bandwidth --device cpu", "bench decode --device tpu"
    files = {"a.json": script.File((good,)), "b.json": script.File((bad,))}
    monkeypatch.setattr(script, "SUITES", {"here": files})
    monkeypatch.setattr(script.subprocess, "run", RUN)  # the commit of a row
    monkeypatch.delattr(script, "_run_apart")
    places = ["--parts", str(tmp_path / "parts"), "--results", str(tmp_path)]
    assert script.main(["here", "--in-process", *places]) == 1
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert row["command"] == f"soloist {good} --json"
    assert row["gb_per_s"]["median"] > 0
    assert "error: device 'tpu'" in capsys.readouterr().out
