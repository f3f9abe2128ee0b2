"""The wheel works where nothing else of the project is."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import soloist

ROOT = Path(__file__).parents[2]
# What the project's own tree has and a stranger's environment has not.
OWN_VARIABLES = ("PYTHONPATH", "SOLOIST_CACHE", "VIRTUAL_ENV")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    build = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    folder = tmp_path_factory.mktemp("dist")
    (made,) = build.WheelBuilder(str(ROOT)).build(directory=str(folder))
    return Path(made)


def environment(folder: Path, *, with_pip: bool) -> Path:
    """A new environment; its Python."""
    venv.create(folder, with_pip=with_pip, symlinks=os.name != "nt")
    return folder / "bin" / "python"


def done(*command: object, cwd: Path, **variables: str) -> str:
    """What a command says, run from a folder that has nothing of the project."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    ran = subprocess.run(
        list(map(str, command)), cwd=cwd, env=inherited | variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def is_tried(script: Path, cwd: Path, **variables: str) -> None:
    """What somebody types first."""
    assert done(script, "--version", cwd=cwd, **variables).strip() == (
        f"soloist {soloist.__version__}"
    )
    text = done(
        script, "run", "etude", "--device", "cpu", "--prompt", "def add(a, b):", "-n", "8",
        cwd=cwd, **variables,
    )  # fmt: skip
    assert text.strip()
    assert "12.8 M" in done(script, "info", "etude", cwd=cwd, **variables)


def test_the_wheel_is_small_and_has_all_files(wheel) -> None:
    assert wheel.stat().st_size < 40_000_000
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    source = ROOT / "src"
    ours = {
        str(file.relative_to(source))
        for file in (source / "soloist").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert ours <= names
    assert {name for name in names if ".dist-info/" not in name} == ours


def test_what_others_wrote_brings_its_licence(wheel) -> None:
    with zipfile.ZipFile(wheel) as content:
        told = [name for name in content.namelist() if ".dist-info/licenses/" in name]
    for licence in (ROOT / "src").rglob("vendor/*.LICENSE"):
        assert any(name.endswith(f"/vendor/{licence.name}") for name in told), licence


def test_the_wheel_runs_with_this_environments_packages(wheel, tmp_path) -> None:
    """Quick: what it depends on comes from here, the package itself from the wheel alone."""
    python = environment(tmp_path / "new", with_pip=False)
    site = Path(
        done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
        .strip()
    )  # fmt: skip
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    script = tmp_path / "new" / "bin" / "soloist"
    script.write_text(f"#!{python}\nfrom soloist.cli import main\nmain()\n")
    script.chmod(0o755)
    # Folders named so are searched without their .pth files, one of which leads to the sources.
    packages = {"PYTHONPATH": sysconfig.get_path("purelib")}
    found = done(python, "-c", "import soloist; print(soloist.__file__)", cwd=tmp_path, **packages)
    assert Path(found.strip()).is_relative_to(tmp_path)
    is_tried(script, tmp_path, **packages)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="packages are pinned for Linux")
def test_the_wheel_installs_all_it_needs(wheel, tmp_path) -> None:
    """Minutes: pip installs the wheel and its dependencies into an empty environment."""
    python = environment(tmp_path / "new", with_pip=True)
    # Versions as they are tested: an open range of torch would be another download.
    done(
        python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--constraint", ROOT / "requirements.txt", wheel, cwd=tmp_path,
    )  # fmt: skip
    done(python, "-m", "pip", "check", cwd=tmp_path)
    is_tried(tmp_path / "new" / "bin" / "soloist", tmp_path)
