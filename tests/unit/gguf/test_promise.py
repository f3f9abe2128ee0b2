"""A file of the hub is judged by its first bytes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from soloist.errors import CheckpointError
from soloist.model.folder import require_readable
from soloist.model.gguf.promise import require_promising
from unit.gguf.test_configuration import file_of, with_architecture
from unit.gguf.test_header import file_of as any_file
from unit.gguf.test_header import info


def test_architecture_and_types_are_known_from_the_first_bytes(tmp_path: Path) -> None:
    data = file_of(tmp_path).read_bytes()
    for head in (data, data[:-5000], data[:100]):
        require_promising("o/n/m.gguf", head, len(data))
    other = with_architecture(data, "gemma3")
    with pytest.raises(CheckpointError, match=r"o/n/m\.gguf: 'general\.architecture' is 'gemma3'"):
        require_promising("o/n/m.gguf", other[:-5000], len(other))
    wide = any_file(tmp_path, infos=[info("a", (1 << 20, 256), 10)]).read_bytes()
    with pytest.raises(CheckpointError, match="the type of tensor 'a' is Q2_K"):
        require_promising("o/n/m.gguf", wide, len(wide) + (1 << 40))


def test_only_the_first_bytes_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, asked = with_architecture(file_of(tmp_path).read_bytes(), "gemma3"), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{1 << 33}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/m.gguf"
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *_, **__: url)
    try:
        with pytest.raises(CheckpointError, match="'gemma3'"):
            require_readable("o/n", tmp_path / "absent", "m.gguf")
        assert asked == [f"bytes=0-{32 << 20}"]
        require_readable("o/n", tmp_path, "m.gguf")  # it is here already
        assert len(asked) == 1
    finally:
        server.shutdown()
        server.server_close()
    require_readable("o/n", tmp_path / "absent", "m.gguf")  # nobody answers: fetching will say so
