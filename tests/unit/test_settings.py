"""What the environment decides."""

from pathlib import Path

import pytest

from soloist.errors import SettingError
from soloist.settings import read_settings


def cache(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Path | None:
    for name in ("SOLOIST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return read_settings().cache


def test_the_cache_is_where_it_is_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache(monkeypatch, SOLOIST_CACHE="/a/b", XDG_CACHE_HOME="/c") == Path("/a/b")
    assert cache(monkeypatch, SOLOIST_CACHE="~/b", HOME="/home/me") == Path("/home/me/b")


def test_the_cache_is_by_default_with_the_users_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache(monkeypatch, XDG_CACHE_HOME="/c") == Path("/c/soloist")
    home = Path("/home/me/.cache/soloist")
    assert cache(monkeypatch, HOME="/home/me") == home
    assert cache(monkeypatch, HOME="/home/me", XDG_CACHE_HOME="relative") == home


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    assert cache(monkeypatch) is None


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_a_relative_cache_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    with pytest.raises(SettingError, match=r"SOLOIST_CACHE .* an absolute path"):
        cache(monkeypatch, SOLOIST_CACHE=given)
