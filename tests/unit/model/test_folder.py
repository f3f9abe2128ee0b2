"""From what a user types to a folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from soloist.errors import (
    CheckpointError,
    DownloadFailed,
    GgufChoice,
    MissingFile,
    ModelNotFound,
    NotAModel,
)
from soloist.model.folder import SHIPPED, find_adapter, find_model, shipped_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "some model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def _empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_path_is_taken_as_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(str(model)) == model
    assert find_model(f"{model}/") == model
    monkeypatch.chdir(model.parent)
    assert find_model("some model") == Path("some model")


def test_a_tilde_is_the_home_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert find_model("~/some model") == model


def test_a_shipped_name_is_a_folder_of_the_package(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr("soloist.model.folder.shipped_folder", lambda name: model if name else None)
    for name in SHIPPED:
        assert find_model(name) == model


def test_shipped_models_lie_beside_the_code() -> None:
    assert shipped_folder("etude").parent.parent.name == "soloist"


def test_a_shipped_model_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("soloist.model.folder.shipped_folder", lambda name: tmp_path / f"no-{name}")
    with pytest.raises(MissingFile, match=r"config\.json"):
        find_model("etude")


def test_a_file_is_answered_with_its_folder(model: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file") as caught:
        find_model(str(model / "config.json"))
    assert str(model) in caught.value.hint


def test_a_folder_with_only_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(NotAModel, match="an adapter of 'owner/base'"):
        find_model(str(tmp_path))


def hub_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """A hub whose repositories are all `folder`; which files were asked for."""
    asked: list[set[str]] = []

    def download(_: str, *, allow_patterns: list[str], **__: object) -> str:
        asked.append(set(allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_of_an_adapter_on_the_hub_two_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    asked = hub_with(tmp_path, monkeypatch)
    assert find_adapter("owner/lora") == tmp_path
    assert asked == [{"adapter_config.json", "adapter_model.safetensors"}]
    with pytest.raises(NotAModel, match="an adapter of 'owner/base'") as caught:
        find_model("owner/lora")
    assert "with --adapter" in caught.value.hint


def test_a_repository_without_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_with(tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=r"owner/lora holds no adapter_config\.json"):
        find_adapter("owner/lora")


def test_a_folder_with_only_another_format_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(MissingFile, match=r"config\.json") as caught:
        find_model(str(tmp_path))
    assert caught.value.hint.startswith("model.onnx is a graph for ONNX")


def test_a_hub_repository_without_config_may_hold_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    on_hub = SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.onnx")])
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: on_hub)
    with pytest.raises(MissingFile) as caught:
        find_model("owner/name-ONNX")
    assert "such as ONNX" in caught.value.hint


GGUFS = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf")


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "m-Q8_0.gguf"
    file.touch()
    (tmp_path / "mmproj-m-F16.gguf").touch()
    assert find_model(str(file)) == file
    assert find_model(str(tmp_path)) == file  # the only one, beside what is no model
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == file  # without weights of its own
    (tmp_path / "model.safetensors").touch()
    assert find_model(str(tmp_path)) == tmp_path
    assert find_model(f"{tmp_path}:q8_0") == file


def test_of_several_gguf_files_one_has_to_be_named(tmp_path: Path) -> None:
    for name in GGUFS:
        (tmp_path / name).touch()
    with pytest.raises(GgufChoice, match=r"holds 2 GGUF models.*m-Q4_K_M\.gguf, m-Q8_0") as caught:
        find_model(str(tmp_path))
    assert f"such as {tmp_path}:Q4_K_M" in caught.value.hint
    assert find_model(f"{tmp_path}:q4_k_m") == tmp_path / GGUFS[0]
    with pytest.raises(GgufChoice, match=r"no GGUF model 'Q4_K' \(it holds: m-Q4_K_M"):
        find_model(f"{tmp_path}:Q4_K")


def test_a_part_leads_to_the_first(tmp_path: Path) -> None:
    names = [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names:
        (tmp_path / name).touch()
    assert find_model(str(tmp_path / names[2])) == tmp_path / names[0]
    assert find_model(str(tmp_path)) == tmp_path / names[0]
    (tmp_path / names[1]).unlink()
    with pytest.raises(MissingFile):  # some parts are no model
        find_model(str(tmp_path))


def test_a_gguf_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(hub_id: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append((hub_id, allow_patterns))
        for name in allow_patterns:
            if name.endswith(".gguf"):
                (tmp_path / name).touch()
        return str(tmp_path)

    on_hub = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in GGUFS])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: on_hub)
    with pytest.raises(GgufChoice, match="owner/name holds 2 GGUF models") as caught:
        find_model("owner/name")
    assert "such as owner/name:Q4_K_M" in caught.value.hint
    with pytest.raises(GgufChoice, match=r"it holds: m-Q4_K_M\.gguf, m-Q8_0"):
        find_model("owner/name:Q6_K")
    asked.clear()
    assert find_model("owner/name:Q8_0") == tmp_path / GGUFS[1]
    assert asked[-1] == ("owner/name", [GGUFS[1]])  # and no other
    monkeypatch.setattr(huggingface_hub, "model_info", None)  # offline it is not asked
    assert find_model("owner/name:q8_0", offline=True) == tmp_path / GGUFS[1]


def test_a_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(MissingFile, match=r"holds no config\.json \(it holds: model\.safetensors"):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MissingFile, match="is empty"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    "given",
    [
        "",
        "nothing",
        "./nothing/here",
        "/nothing",
        "some/absent.gguf",
        "absent.gguf:Q8_0",
        "a/b/c",
        "~nobody-of-this-name/x",
        "a b/c",
        "x" * 5000,
    ],
)
def test_nonsense_is_refused_with_what_there_is(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no model") as caught:
        find_model(given)
    assert all(name in str(caught.value) for name in SHIPPED)


@pytest.mark.usefixtures("_empty_hub")
def test_a_hub_id_that_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DownloadFailed, match=r"'owner/name'.*not in the local cache"):
        find_model("owner/name", offline=True)


def test_of_a_hub_model_only_what_soloist_reads_is_fetched(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(hub_id: str, **options: object) -> str:
        asked.append((hub_id, options))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    index = {"weight_map": {"a": "weights-2.safetensors", "b": "weights-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_model("owner/na.me", revision="abc") == model
    (first, description), (second, everything) = asked
    assert first == second == "owner/na.me"
    assert description["revision"] == "abc"
    assert everything["revision"] == model.name  # the commit that the index is of
    assert everything["local_files_only"] is False
    assert "config.json" in description["allow_patterns"]
    assert not any("*.json" in p or "safetensors" in p[-11:] for p in description["allow_patterns"])
    added = everything["allow_patterns"][len(description["allow_patterns"]) :]
    assert added == ["weights-1.safetensors", "weights-2.safetensors"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("disk full\nat some line"), "disk full"),
        (OSError(), "OSError"),
        (HFValidationError("bad name"), "bad name"),
        (LocalEntryNotFoundError("…"), "unreachable"),
    ],
)
def test_a_failed_download_says_why(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadFailed, match=f"owner/name.*{reason}") as caught:
        find_model("owner/name")
    assert "\nat some line" not in caught.value.message


def test_only_the_wanted_files_of_a_hub_model_are_fetched(monkeypatch, tmp_path):
    asked = {}

    def fetch(hub_id, **options):
        asked[hub_id] = options["allow_patterns"]
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert find_model("some/model", wanted=("config.json",)) == tmp_path
    assert asked["some/model"] == ["config.json"]
    find_model("some/model")
    assert "model.safetensors" in asked["some/model"]
