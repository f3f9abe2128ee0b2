"""A well-behaved client in a process of its own: python -m server.steady PORT TOKENS.

It says `ready`. For a line `N` it reads one greedy stream so often, for `go` again and again until
the next line, and writes for each its text, how it ended and when its tokens came. Blocking sockets
and nothing else to do, so that a gap that it sees is the server's.
"""

import json
import select
import socket
import sys
import time

PROMPT = "class Stack:\n    def __init__(self):\n"
_END = b"\r\n0\r\n\r\n"
_PATIENCE_S = 60


def ask(port: int, tokens: int) -> dict[str, object]:
    """One stream.

    text: all of it; error: why it is not whole, or None; first_s: from asking to the first piece;
    times: of `time.perf_counter` when pieces came, each with at least one token.
    """
    body = json.dumps(
        {
            "model": "etude-draft", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0,
            "seed": 7, "ignore_eos": True, "stream": True,
        }
    )  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    parts: list[tuple[float, bytes]] = []
    error, start = None, time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.sendall((head + body).encode())
            tail = b""
            while not tail.endswith(_END):
                part = server.recv(1 << 16)
                if not part:
                    error = "the connection was closed"
                    break
                parts.append((time.perf_counter(), part))
                tail = (tail + part)[-len(_END) :]
                # A refusal is no stream.
                if len(parts) == 1 and not part.startswith(b"HTTP/1.1 200 "):
                    error = part.decode(errors="replace")
                    break
    except OSError as told:
        error = f"{type(told).__name__}: {told}"
    return read(parts, start, error)


def read(parts: list[tuple[float, bytes]], start: float, error: str | None) -> dict[str, object]:
    """What the parts of a reply say."""
    text, times, rest = "", list[float](), b""
    for at, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        events = [line[6:] for line in lines if line.startswith(b"data: {")]
        for event in map(json.loads, events):
            if "error" in event:
                error = str(event["error"])
            piece = "".join(choice["text"] for choice in event.get("choices", ()))
            if piece:
                text += piece
                times.append(at)
    first_s = times[0] - start if times else None
    return {"text": text, "error": error, "first_s": first_s, "times": times}


def main() -> None:
    port, tokens = map(int, sys.argv[1:])
    _say("ready")
    for line in sys.stdin:
        if line.strip() == "go":
            found = []
            while not select.select([sys.stdin], [], [], 0)[0]:
                found.append(ask(port, tokens))
            sys.stdin.readline()
        else:
            found = [ask(port, tokens) for _ in range(int(line))]
        _say(json.dumps(found))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
