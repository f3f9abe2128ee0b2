"""What the Dockerfile says agrees with the project."""

import json
import re
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.main import get_command

from soloist.cli.app import app
from soloist.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
LINES = [
    line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if line and line[0] not in "# "
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def told(instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{instruction} ")]


def test_the_base_is_a_python_that_the_project_is_for() -> None:
    version = next(a.partition("=")[2] for a in told("ARG") if a.startswith("PYTHON="))
    assert told("FROM") == ["python:${PYTHON}-slim"]
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_it_starts_the_server_as_the_command_line_has_it() -> None:
    (entry,), command = json.loads(told("ENTRYPOINT")[0]), json.loads(told("CMD")[0])
    assert PROJECT["scripts"][entry] == "soloist.cli:main"
    serve = get_command(app()).commands["serve"]
    context = serve.make_context("serve", list(command[1:]))
    assert command[0] == "serve"
    assert context.params["host"] == "0.0.0.0"  # noqa: S104 - the container's own
    port = str(context.params["port"])
    assert port == str(ServerConfig(names=("x",)).port)
    assert told("EXPOSE") == [port]
    (health,) = told("HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/health" in health
    assert set(re.findall(r"\d{4}", DOCKERFILE)) == {port}


def test_packages_are_those_that_are_pinned() -> None:
    run, _ = told("RUN")
    assert "--constraint requirements.txt ." in run
    pins = (ROOT / "requirements.txt").read_text("utf-8")
    pinned = {_plain(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    needed = {_plain(re.match(r"[\w.-]+", one)[0]) for one in PROJECT["dependencies"]}
    assert needed <= pinned


def test_kernels_are_compiled_where_the_server_looks_for_them() -> None:
    _, run = told("RUN")
    assert "COMPILE=" in told("ARG")
    assert "soloist compile ${COMPILE}" in run
    place = {line.partition(" ")[0]: at for at, line in enumerate(LINES)}
    assert place["ENV"] < LINES.index(f"RUN {run}") < place["VOLUME"]  # what is later is not kept
    context = (
        get_command(app()).commands["compile"].make_context("compile", ["etude", "--arch", "x"])
    )
    assert context.params["arch"] == "x"


def test_settings_are_ones_that_are_read() -> None:
    (given,) = told("ENV")
    names = re.findall(r"([A-Z_]+)=", given)
    settings = (ROOT / "src/soloist/settings.py").read_text("utf-8")
    assert [name for name in names if name.startswith("SOLOIST") and name in settings]


def test_what_is_copied_builds_the_package(tmp_path) -> None:
    build = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for copied in told("COPY"):
        *sources, _ = copied.split()
        assert set(sources) <= let_in
        for source in sources:
            origin = ROOT / source
            if origin.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(origin, tmp_path / source, ignore=ignored)
            else:
                shutil.copy(origin, tmp_path)
    (wheel,) = build.WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"))
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert "soloist/server/page/index.html" in names
    assert "soloist/models/etude/model.safetensors" in names


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
