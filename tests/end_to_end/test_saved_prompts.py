"""Prompts that outlive the process, and a server's restart."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from server.running import serve_in_a_process

LOAD = """
import json, sys
from pathlib import Path
from soloist.engine import Completion, Engine, EngineConfig
from soloist.sampling import SamplingParams
asked = EngineConfig(sys.argv[2], device="cpu", context_tokens=1024, sequences=2,
    keeps_prefixes=True, cache_dir=Path(sys.argv[1]))
engine = Engine.load(asked)
*_, end = engine.generate("def f(x):\\n    return x\\n" * 60, SamplingParams(max_tokens=8))
assert isinstance(end, Completion)
engine.model.flush(10)
print(json.dumps([end.timings.cached_tokens, engine.model.saved.saved, end.text]))
"""


def in_a_process(root: Path, model: object) -> list[object]:
    command = [sys.executable, "-c", LOAD, str(root), str(model)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_another_process_finds_them_unless_the_weights_changed(etude: Path, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    cached, saved, text = in_a_process(root, etude)
    assert cached == 0
    assert saved
    assert in_a_process(root, etude) == [saved, 0, text]
    # Some bytes of one tensor: same names, same shapes, same size.
    file = etude / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2:] = b"\0\0"
    file.write_bytes(content)
    assert in_a_process(root, etude)[:2] == [0, saved]


def asked(
    folder: Path, body: dict[str, object], model: str = "etude", *options: str
) -> tuple[dict, str]:
    """The reply of a server that lives for one request, and its metrics."""
    process, url = serve_in_a_process(
        model, "--device", "cpu", "--context", "2048", "--cache-dir", str(folder), *options
    )
    with process:
        try:
            reply = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text
            return reply.json(), httpx2.get(f"{url}/metrics", timeout=60).text
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def value(metrics: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_a_restarted_server_goes_on_where_it_was(tmp_path: Path) -> None:
    body = {
        "prompt": "def f(x):\n    return x + 1\n\n" * 60,
        "max_tokens": 24, "temperature": 1.0, "seed": 5, "logprobs": 3,
    }  # fmt: skip
    first, metrics = asked(tmp_path, body)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert value(metrics, 'soloist_prefix_disk_tokens_total{what="loaded"}') == 0
    again, metrics = asked(tmp_path, body)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["usage"]["prompt_tokens"] - 1) // 128 * 128 > 0
    assert again["choices"] == first["choices"], "tokens, and the bits of their probabilities"
    assert value(metrics, 'soloist_prefix_disk_tokens_total{what="loaded"}') == cached
    assert value(metrics, 'vllm:external_prefix_cache_hits_total{model_name="etude"}') == cached
    assert value(metrics, "soloist_prefix_disk_bytes_limit") == 20e9
    held = sum(file.stat().st_size for file in tmp_path.glob("*/*.kv"))
    assert value(metrics, "soloist_prefix_disk_bytes") == held
    other, _ = asked(tmp_path, body, "etude-draft")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "another model"
    rounded, _ = asked(tmp_path, body, "etude", "--precision", "bf16")
    assert rounded["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "another precision"
    assert len(list(tmp_path.glob("*/0*-*.kv"))) == 3


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--cache-dir", "file"), ("file", "can be written")),
        (("--cache-dir-gb", 3), ("only with a folder", "--cache-dir")),
        (("--cache-dir", ".", "--cache-dir-gb", -1), ("more than 0 GB",)),
        (("--cache-dir", ".", "--no-prefix-cache"), ("--no-prefix-cache",)),
    ],
)
def test_folders_and_bounds_that_cannot_be(
    soloist, tmp_path: Path, monkeypatch, options: tuple[object, ...], facts: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    outcome = soloist("serve", "etude", "--port", 0, *options)
    assert outcome.status == 2
    assert "Traceback" not in outcome.err
    _, _, error = outcome.err.partition("error: ")
    assert all(fact in error for fact in facts)
    assert "\n\nhint: " in error
