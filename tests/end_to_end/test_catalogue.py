"""`soloist pull`, `list` and `rm` over a hub's cache in a temporary folder, with a stubbed hub."""

import hashlib
import io
import json
import os
import re
import shutil
import threading
from contextlib import redirect_stderr
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from soloist.cli import main
from soloist.cli.fitting import find_fit
from soloist.cli.machine import Card, Machine
from soloist.engine.memory import Footprint
from soloist.engine.support import support_on
from soloist.errors import DownloadFailed
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import shipped_folder
from soloist.model.transfer import fetch, find_missing

COMMIT = "c" * 40
WEIGHTS = (shipped_folder("etude-draft") / "model.safetensors").read_bytes()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return folder


def keep(cache, hub_id="some/model", commit=COMMIT, without=(), **changes):
    """A shipped model as the hub's client keeps it: files in blobs, links in the snapshot."""
    place = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    for folder in (place / "blobs", place / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    for file in shipped_folder("etude-draft").iterdir():
        if file.name not in without:
            data = file.read_bytes()
            if file.name == "config.json":
                data = json.dumps({**json.loads(data), **changes}).encode()
            blob = place / "blobs" / hashlib.sha256(data).hexdigest()
            blob.write_bytes(data)
            link(blob, snapshot / file.name)
    return snapshot


def link(blob, pointer):
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))


class Hub:
    """A server of one file's bytes; `breaks_after` so many of them it hangs up, once."""

    def __init__(self):
        hub = self
        self.ranges, self.breaks_after, self.data = [], None, WEIGHTS

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.ranges.append(self.headers["Range"])
                start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
                self.send_header("Content-Length", str(len(hub.data) - start))
                self.end_headers()
                end, hub.breaks_after = hub.breaks_after, None
                self.wfile.write(hub.data[start:end])
                self.close_connection = True

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/model.safetensors"


@pytest.fixture
def hub(monkeypatch, cache):
    """The hub with the model some/model, its description in the cache once it was asked for."""
    made = Hub()

    def snapshot_download(hub_id, *, allow_patterns, **_):
        made.asked = allow_patterns
        place = cache / f"models--{hub_id.replace('/', '--')}" / "snapshots" / COMMIT
        return str(place if place.is_dir() else keep(cache, hub_id, without=["model.safetensors"]))

    def hf_hub_download(hub_id, name, revision):
        place = cache / f"models--{hub_id.replace('/', '--')}"
        link(
            place / "blobs" / hashlib.sha256(WEIGHTS).hexdigest(),
            place / "snapshots" / revision / name,
        )

    facts = SimpleNamespace(etag=hashlib.sha256(WEIGHTS).hexdigest(), size=len(WEIGHTS))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *_, **__: made.url)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda _: facts)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_pulled_model_is_whole_and_listed(soloist, cache, hub):
    outcome = soloist("pull", "some/model")
    assert (outcome.status, outcome.out) == (0, "")
    assert "some/model · 1 file of weights, 3.58 MB" in outcome.err
    assert "runs on: reference" in outcome.err
    assert "model.safetensors" not in hub.asked  # its own transfer does that
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == ["bytes=0-"]
    listed = json.loads(soloist("list", "--json").out)["models"]
    assert [m["model"] for m in listed] == ["some/model", "etude", "etude-draft"]
    mine = listed[0]
    assert (mine["revision"], mine["is_complete"]) == (COMMIT, True)
    assert mine["bytes"] == sum(f.stat().st_size for f in snapshot.iterdir())
    assert mine["fit"]["weights"] == "bf16"
    assert mine["fit"]["executor"] == "reference"
    assert soloist("pull", "some/model").status == 0
    assert len(hub.ranges) == 1  # nothing is fetched twice


def test_a_broken_connection_and_a_broken_program_go_on(cache, hub, soloist):
    snapshot = keep(cache, without=["model.safetensors"])
    part = snapshot.parents[1] / "blobs" / (hashlib.sha256(WEIGHTS).hexdigest() + ".incomplete")
    part.write_bytes(WEIGHTS[:1_000_000])
    assert "soloist pull some/model goes on" in soloist("list").out
    hub.breaks_after = 3_000_000
    outcome = soloist("pull", "some/model")
    assert outcome.status == 0
    assert "goes on after 1 MB" in outcome.err
    assert hub.ranges == ["bytes=1000000-", "bytes=3000000-"]
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert not part.exists()


def test_a_terminal_shows_bytes_rate_and_time_left(hub, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with redirect_stderr(Terminal()) as shown, pytest.raises(SystemExit, match="0"):
        main(["pull", "some/model"])
    assert hub.ranges == ["bytes=0-"]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert re.search(r"fetching .* 3\.6/3\.6 MB [0-9.]+ .B/s \S+ left", plain), plain


def test_progress_counts_each_byte_once(cache, hub):
    snapshot = keep(cache, without=["model.safetensors"])
    hub.breaks_after = 2_000_000
    counted = []
    missing = find_missing("some/model", snapshot, ["model.safetensors", "config.json"])
    fetch("some/model", snapshot, missing, counted.append)
    assert sum(counted) == len(WEIGHTS)


def test_other_bytes_than_promised_are_refused(cache, hub):
    snapshot = keep(cache, without=["model.safetensors"])
    hub.data = WEIGHTS[:-1] + b"?"
    missing = find_missing("some/model", snapshot, ["model.safetensors"])
    with pytest.raises(DownloadFailed, match="not those that its hash promises"):
        fetch("some/model", snapshot, missing, lambda _: None)
    assert not missing[0].part.exists()
    assert not missing[0].blob.exists()


def test_a_part_that_is_too_long_does_not_stay(cache, hub):
    snapshot = keep(cache, without=["model.safetensors"])
    (missing,) = find_missing("some/model", snapshot, ["model.safetensors"])
    missing.part.write_bytes(WEIGHTS + b"?")
    with pytest.raises(DownloadFailed, match="bytes arrived; they were deleted"):
        fetch("some/model", snapshot, [missing], lambda _: None)
    fetch("some/model", snapshot, [missing], lambda _: None)
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges == ["bytes=0-"]


def test_weights_of_an_unknown_family_are_not_fetched(soloist, cache, hub):
    keep(cache, without=["model.safetensors"], model_type="mystery")
    outcome = soloist("pull", "some/model")
    assert outcome.status == 2
    assert "model_type 'mystery' is not supported" in outcome.err
    assert hub.ranges == []


def test_weights_that_do_not_fit_the_disk(soloist, hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    outcome = soloist("pull", "some/model")
    assert outcome.status == 3
    assert "has 1 kB free; nothing was written" in outcome.err
    assert hub.ranges == []


@pytest.mark.parametrize("given", ["etude", "/some/folder", "name"])
def test_only_hub_ids_are_pulled(soloist, given):
    outcome = soloist("pull", given)
    assert outcome.status == 2
    assert "a hub id of the form owner/name" in outcome.err


def test_what_cannot_run_is_listed_with_its_reason(soloist, cache):
    keep(cache, "a/strange", model_type="mystery")
    keep(cache, "b/fine")
    (cache / "datasets--x--y").mkdir()
    lines = soloist("list").out.splitlines()
    assert "model_type 'mystery' is not supported" in lines[1]
    assert "yes, context" in lines[2]
    assert len(lines) == 1 + 2 + 2 + 1


def test_a_machine_decides_what_fits_and_what_runs():
    folder = shipped_folder("etude")
    card = Card("H200", (9, 0), 132, 227 * 1024, 141 * 10**9, 140 * 10**9, "0")
    on_gpu = find_fit(folder, Machine(card, 10**9))
    assert (on_gpu.executor, on_gpu.precision) == ("decode kernel", "bf16")
    assert on_gpu.context_tokens == on_gpu.most_tokens
    config = read_config(folder / "config.json")
    plan = support_on((9, 0), 132, 227 * 1024, config, Dtype.BF16).plan
    of_pages = Footprint(config, tensors(config), Dtype.BF16, plan, True, page_attention=True)
    assert on_gpu.needed_bytes == of_pages.estimate(1).needed_bytes, "as prompts are read there"
    old = Card("T4", (7, 5), 40, 64 * 1024, 16 * 10**9, None, "0")
    on_old = find_fit(folder, Machine(old, 10**9))
    assert on_old.executor == "reference"
    assert "7.5" in on_old.obstacle
    assert on_old.room_bytes == 16 * 10**9
    tight = find_fit(folder, Machine(None, 310 * 10**6))
    assert tight.fits_in_words.startswith("no: 3")
    assert find_fit(folder, Machine(None, 345 * 10**6)).precision == "bf16"


def test_removing_says_what_and_needs_a_yes(soloist, cache):
    keep(cache)
    size = json.loads(soloist("list", "--json").out)["models"][0]["bytes"]
    outcome = soloist("rm", "some/model", stdin=b"")
    assert outcome.status == 2
    assert "1 revision · 4.14 MB become free" in outcome.err
    assert "add --yes" in outcome.err
    assert (cache / "models--some--model").is_dir()
    assert size > 4_000_000
    assert soloist("rm", "some/model", "--yes").status == 0
    assert not (cache / "models--some--model").exists()


def test_removing_leaves_everything_else(soloist, cache, tmp_path):
    outside = tmp_path / "precious.safetensors"
    outside.write_bytes(b"mine")
    snapshot = keep(cache)
    other = keep(cache, "copy/model")  # with the same commit
    (snapshot / "outside.safetensors").symlink_to(outside)
    (snapshot.parents[1] / "blobs" / "x.incomplete").write_bytes(b"half")
    assert soloist("rm", "some/model", "-y").status == 0
    assert not snapshot.parents[1].exists()
    assert outside.read_bytes() == b"mine"
    assert (other / "model.safetensors").read_bytes() == WEIGHTS


def test_a_link_in_the_cache_is_not_followed(soloist, cache, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    keep(elsewhere)
    (cache / "models--some--model").symlink_to(elsewhere / "models--some--model")
    outcome = soloist("rm", "some/model", "-y")
    assert outcome.status == 2
    assert "no model 'some/model' in the hub's cache" in outcome.err
    assert list(Path(elsewhere).rglob("model.safetensors"))


@pytest.mark.parametrize("given", ["etude", "../outside", "some/other", ""])
def test_only_models_of_the_cache_are_removed(soloist, cache, given):
    keep(cache)
    outcome = soloist("rm", given, "--yes")
    assert outcome.status == 2
    assert "it holds: some/model" in outcome.err
    assert (cache / "models--some--model").is_dir()
