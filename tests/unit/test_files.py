"""Small files of a model folder: what is no file, or no JSON object, is refused at once."""

import os
from pathlib import Path

import pytest

from soloist.errors import NotAFile, SoloistError, UnknownFamily, UnsupportedField, visible
from soloist.files import is_there, parsed_object, require_file


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert parsed_object(file) == {"a": [1, "é"]}
    file.write_text('{"a":' * 64 + "1" + "}" * 64)
    assert list(parsed_object(file)) == ["a"]


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(NotAFile, match=r"config\.json is a pipe \(allowed: a file\)"):
        parsed_object(pipe)


@pytest.mark.parametrize(("path", "kind"), [("/dev/zero", "a device"), ("/", "a folder")])
def test_other_things_are_named(path: str, kind: str) -> None:
    with pytest.raises(NotAFile, match=kind):
        require_file(Path(path))


def test_a_link_to_nothing_is_there_and_cannot_be_read(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(tmp_path / "gone")
    assert is_there(link)
    with pytest.raises(FileNotFoundError):
        parsed_object(link)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ("[]", "a JSON list"),
        ('{"a"', "line 1, column 5"),
    ],
    ids=["brackets", "objects", "a long number", "a list", "cut"],
)
def test_what_is_wrong_with_a_file_is_said(content: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=told):
        parsed_object(file)


def test_characters_that_steer_a_terminal_are_made_visible() -> None:
    assert visible("a\x1b[31m\u202eb\ud800\n") == "a\\x1b[31m\\u202eb\\ud800\n"
    assert visible("étude · 日本 → …") == "étude · 日本 → …"
    assert "\x1b" not in str(SoloistError("\x1b]0;x\x07", "\x1b[2J"))
    told = str(UnsupportedField("f", "a\nerror: b\x1b", "\x1b[2J", "absent", "llama"))
    assert "'a\\nerror: b\\x1b'" in told
    assert "\x1b" not in told


def test_long_names_are_cut() -> None:
    assert len(str(UnknownFamily("f", "x" * 3_000_000, ["llama"]))) < 500
    assert len(str(UnsupportedField("f", "x" * 3_000_000, "y" * 3_000_000, "z", "llama"))) < 700
