"""A client in a process of its own that only waits for first pieces: python waiter.py PORT TURNS.

It says `ready`, waits for a line, asks so many times for a chat and writes the seconds from sending
each request to its first text. Blocking sockets, so that what is measured is the server's.
"""

import json
import socket
import sys
import time

_CONTENT, _END = b'"content":', b"\r\n0\r\n\r\n"


def main() -> None:
    port, turns = map(int, sys.argv[1:])
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "ignore_eos": True,
            "stream": True,
        }
    )  # fmt: skip
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    request, found = (head + body).encode(), []
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(turns):
            start = time.perf_counter()
            server.sendall(request)
            reply = b""
            while _CONTENT not in reply:
                reply += server.recv(1 << 16)
            found.append(time.perf_counter() - start)
            while _END not in reply:
                reply += server.recv(1 << 16)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
