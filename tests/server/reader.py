"""A client in a process of its own: python reader.py PORT STREAMS TOKENS TURNS.

It says `ready`, waits for a line, reads so many chats side by side, so often, and writes for each
its text, how many pieces there were and the time from asking to the first piece.
"""

import asyncio
import json
import sys
import time

# `bytes.find` is quicker than parsing every event as JSON: this process takes the server's cores.
_CONTENT, _AFTER = b'"content":', b'},"logprobs"'


async def chat(port: int, num_tokens: int, turns: int) -> list[dict[str, object]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    await ask(reader, writer, 2)
    found = [await ask(reader, writer, num_tokens) for _ in range(turns)]
    writer.close()
    return found


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_tokens: int
) -> dict[str, object]:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens,
            "ignore_eos": True, "stream": True,
        }
    )  # fmt: skip
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    start = time.perf_counter()
    writer.write((head + body).encode())
    reply = await reader.readuntil(_CONTENT)
    first_s = time.perf_counter() - start
    reply += await reader.readuntil(b"\r\n0\r\n\r\n")
    pieces = [part.partition(_AFTER)[0] for part in reply.split(_CONTENT)[1:]]
    text = "".join(json.loads(piece) for piece in pieces)
    return {"text": text, "pieces": len(pieces), "first_s": first_s}


async def main() -> None:
    port, streams, num_tokens, turns = map(int, sys.argv[1:])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    found = await asyncio.gather(*(chat(port, num_tokens, turns) for _ in range(streams)))
    sys.stdout.write(json.dumps([answer for answers in found for answer in answers]))


if __name__ == "__main__":
    asyncio.run(main())
