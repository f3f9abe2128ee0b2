"""A server with exact timing: the n-th token is made at a known time, k of them go into a chunk."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Toy:
    """How it behaves, and what it was asked."""

    tokens_per_chunk: int = 1
    counts: str = "usage in every chunk"  # or 'token ids', 'final usage', 'nothing'
    first_s: float = 0.03
    tokens_per_s: float = 500.0
    refuses: tuple[str, ...] = ()
    echoes: bool = False
    fails: str = ""
    timings: dict | None = None
    asked: list[dict] = field(default_factory=list)
    url: str = ""

    def refusal(self, asked: dict) -> str | None:
        given = {*asked, *asked.get("stream_options", {})}
        bad = [name for name in self.refuses if name in given]
        return f"unknown field: {bad[0]}" if bad else None

    def chunks(self, asked: dict, is_chat: bool) -> Iterator[tuple[float, dict]]:
        """When to send which body, in seconds after the request."""
        prompt = asked["messages"][0]["content"] if is_chat else asked["prompt"]
        read = len(prompt) // 4
        usage = {"prompt_tokens": read, "prompt_tokens_details": {"cached_tokens": 1}}
        made, total = 0, asked["max_tokens"]

        def body(text: str, ids: list[int], end: str | None) -> dict:
            delta = {"delta": {"content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **delta, "finish_reason": end}
            if self.counts == "token ids" and asked.get("return_token_ids"):
                choice["token_ids"] = ids
            whole = {"choices": [choice], "usage": None}
            if self.counts == "usage in every chunk":
                whole["usage"] = {**usage, "completion_tokens": made}
            return whole

        if is_chat:
            yield 0, body(prompt if self.echoes else "", [], None)
        while made < total:
            here = min(self.tokens_per_chunk, total - made)
            made += here
            at_s = self.first_s + (made - 1) / self.tokens_per_s
            yield at_s, body("word " * here, list(range(here)), None)
        yield at_s, body("", [], "length")
        if self.counts != "nothing":
            last = {"choices": [], "usage": {**usage, "completion_tokens": made}}
            yield at_s, last | ({"timings": self.timings} if self.timings else {})


@contextmanager
def serving(toy: Toy) -> Iterator[Toy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, body: dict) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "toy"}]})

        def do_POST(self) -> None:
            start = time.perf_counter()
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked["key"] = self.headers.get("Authorization")
            toy.asked.append(asked)
            if toy.fails:
                return self.reply(500, {"error": toy.fails})
            if refusal := toy.refusal(asked):
                return self.reply(400, {"error": {"message": refusal}})
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at_s, body in toy.chunks(asked, self.path.endswith("/chat/completions")):
                text = json.dumps(body)
                if (left := start + at_s - time.perf_counter()) > 0:
                    time.sleep(left)
                self.write(f"data: {text}\n\n")
            self.write("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
            return None

        def write(self, text: str) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        toy.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield toy
        finally:
            server.shutdown()
            thread.join()
