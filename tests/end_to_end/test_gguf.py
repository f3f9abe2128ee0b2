"""A GGUF file from the command line, as a new user has it; and a hub's repository of them."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from soloist.cli.serving import names_of
from soloist.engine import Engine, EngineConfig
from soloist.sampling import SamplingParams
from unit.gguf.writing import write_etude

PROMPT = "def read_lines(path):\n"
COMMIT = "d" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The shipped draft model in three types."""
    made = tmp_path_factory.mktemp("gguf")
    for kind in ("BF16", "Q8_0", "Q4_0"):
        write_etude(made / f"etude-draft-{kind}.gguf", kind, "etude-draft")
    return made


def text(soloist, model) -> str:
    outcome = soloist("run", model, "--prompt", PROMPT, "-n", "12", "-t", "0", "--device", "cpu")
    assert outcome.status == 0, outcome.err
    return outcome.out


def test_the_same_model_says_the_same(soloist, folder):
    file = folder / "etude-draft-BF16.gguf"
    assert text(soloist, file) == text(soloist, "etude-draft")
    assert text(soloist, f"{folder}:bf16") == text(soloist, file)


def test_the_reference_has_the_bits_of_the_folder(folder):
    """Weights, tokens and chat prompt: nobody can tell the file from the folder."""
    answers = []
    for model in (folder / "etude-draft-BF16.gguf", "etude-draft"):
        engine = Engine.load(EngineConfig(str(model), "cpu", "fp32", context_tokens=256))
        ids = engine.encode_chat([{"role": "user", "content": "return a list"}])
        *_, end = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=8))
        answers.append((ids, end.text, engine.tokenizer.vocab_size, engine.config))
    assert answers[0] == answers[1]


def test_codes_are_named_and_run(soloist, folder):
    file = folder / "etude-draft-Q8_0.gguf"
    assert text(soloist, file)
    facts = json.loads(soloist("info", file, "--json").out)
    assert facts["quantised_as"].startswith("int8 (Q8_0: groups of 32), ")
    assert facts["model"] == file.name
    numbers = facts["by_precision"]["bf16"]["streamed_bytes_per_token"]
    assert facts["kernel_bytes_per_token"] < numbers
    planned = soloist("plan", file, "--hardware", "RTX 4090")
    assert (planned.status, file.name in planned.out) == (0, True)


def test_a_folder_of_several_asks_which(soloist, folder):
    outcome = soloist("run", folder, "--prompt", PROMPT)
    assert outcome.status == 2
    assert "holds 3 GGUF models (allowed: one): etude-draft-BF16.gguf" in outcome.err
    assert f"{folder}:BF16" in "".join(outcome.err.split("\n"))


def test_what_cannot_be_done_with_a_file_is_said(soloist, folder, tmp_path):
    file = folder / "etude-draft-BF16.gguf"
    outcome = soloist("quantize", file, "--weights", "int8", "-o", tmp_path / "out")
    assert outcome.status == 2
    assert "is a GGUF file" in outcome.err
    rounded = folder / "etude-draft-Q8_0.gguf"
    outcome = soloist("run", rounded, "--weights", "int4", "--prompt", PROMPT)
    assert outcome.status == 2
    assert "quantised already: int8 (Q8_0" in " ".join(outcome.err.split())
    outcome = soloist("run", rounded, "--head-weights", "int8", "--prompt", PROMPT)
    assert outcome.status == 2
    assert "its head is quantised already: int8 (Q8_0" in " ".join(outcome.err.split())


@pytest.mark.parametrize("damage", ["cut", "magic", "pipe", "text"])
def test_bad_files_end_in_one_paragraph(damage, soloist, folder, tmp_path):
    file = tmp_path / "bad.gguf"
    data = (folder / "etude-draft-Q4_0.gguf").read_bytes()
    if damage == "pipe":
        os.mkfifo(file)
    else:
        wrong = {"cut": data[: len(data) // 2], "magic": b"GGML" + data[4:], "text": b"hello"}
        file.write_bytes(wrong[damage])
    prompt, on_cpu = ("--prompt", "x"), ("--device", "cpu")
    asked = {"run": (*prompt, *on_cpu), "info": (), "plan": ("--hardware", "RTX 4090")}
    for command, options in asked.items():
        outcome = soloist(command, file, *options)
        assert outcome.status == 2, (command, outcome.err)
        assert "bad.gguf" in outcome.err
        assert "hint:" in outcome.err
        assert "Traceback" not in outcome.err


def test_clients_know_a_file_by_its_name(folder):
    assert names_of(str(folder / "etude-draft-Q8_0.gguf"), None) == ("etude-draft-Q8_0",)
    assert names_of(f"{folder}:Q8_0", None) == (f"{folder.name}:Q8_0",)
    assert names_of("some/model-GGUF:Q8_0", None) == ("some/model-GGUF:Q8_0",)


@pytest.fixture
def cache(tmp_path, monkeypatch, folder):
    """A hub's cache, and a hub with the folder's files as some/model-GGUF."""
    made = tmp_path / "hub"
    place = made / "models--some--model-GGUF"
    snapshot = place / "snapshots" / COMMIT
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(made))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    names = [file.name for file in sorted(folder.iterdir())]

    def snapshot_download(_, **options):
        place.joinpath("refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text(COMMIT)
        for name in options["allow_patterns"]:
            if name in names and not options.get("local_files_only"):
                put(name)
        return str(snapshot)

    def put(name):
        data = (folder / name).read_bytes()
        blob = place / "blobs" / hashlib.sha256(data).hexdigest()
        for parent in (blob.parent, snapshot):
            parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        if not (snapshot / name).is_symlink():
            (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))

    def fetch(_hub_id, snapshot, missing, _advance):
        assert snapshot.is_dir()
        for file in missing:
            put(file.name)

    def facts(url):
        file = folder / url.rsplit("/")[-1]
        return SimpleNamespace(etag="e" + file.name, size=file.stat().st_size)

    siblings = [SimpleNamespace(rfilename=name) for name in ["README.md", *names]]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(
        huggingface_hub, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings)
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda _, name, **__: f"x/{name}")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", facts)
    monkeypatch.setattr("soloist.cli.catalogue.fetch", fetch)
    return snapshot


def test_one_file_of_a_repository_is_pulled_listed_run_and_removed(soloist, cache):
    outcome = soloist("pull", "some/model-GGUF")
    assert outcome.status == 2
    assert "some/model-GGUF holds 3 GGUF models" in outcome.err
    outcome = soloist("pull", "some/model-GGUF:q8_0")
    assert outcome.status == 0, outcome.err
    assert "some/model-GGUF:q8_0 · 1 file of weights" in outcome.err
    assert [file.name for file in cache.iterdir()] == ["etude-draft-Q8_0.gguf"]
    assert soloist("pull", "some/model-GGUF:Q4_0").status == 0
    listed = json.loads(soloist("list", "--json").out)["models"]
    assert [m["model"] for m in listed][:2] == ["some/model-GGUF:Q4_0", "some/model-GGUF:Q8_0"]
    assert listed[1]["fit"]["weights"].startswith("int8 (Q8_0")
    assert listed[1]["bytes"] == (cache / "etude-draft-Q8_0.gguf").stat().st_size
    assert text(soloist, "some/model-GGUF:Q8_0") == text(soloist, cache / "etude-draft-Q8_0.gguf")
    assert "holds no GGUF model 'Q6_K'" in soloist("rm", "some/model-GGUF:Q6_K", "--yes").err
    assert soloist("rm", "some/model-GGUF:Q8_0", "--yes").status == 0
    assert len(list(cache.parents[1].glob("blobs/*"))) == 1
    assert soloist("rm", "some/model-GGUF:Q4_0", "--yes").status == 0
    assert not cache.parents[1].exists()
