"""With an engine that says tokens faster than any model, the server loses none and costs little."""

import asyncio
import threading
import time

import orjson
import pytest

from server.running import Scripted, etude, running, scripted, wait_until_ready
from soloist.server.serve import Server

pytestmark = pytest.mark.timed

TEXT = "def add(first, second):\n    total = first + second\n    return total\n\n"


class Connection:
    """One that is kept."""

    @classmethod
    async def to(cls, server: Server) -> "Connection":
        made = cls()
        port = int(server.url.rpartition(":")[2])
        made.reader, made.writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        return made

    async def stream(self, num_tokens: int) -> tuple[str, float, int]:
        """A chat's text, the time of its first piece, and how many pieces there were."""
        body = orjson.dumps(
            {
                "messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens,
                "ignore_eos": True, "stream": True,
            }
        )  # fmt: skip
        path = "/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        text, first, pieces = [], 0.0, 0
        async for line in self.reader:
            if line == b"0\r\n":  # the last chunk of the reply
                await self.reader.readline()
                break
            if not line.startswith(b"data: {"):
                continue
            chunk = orjson.loads(line[6:])
            if piece := chunk["choices"][0]["delta"].get("content"):
                first = first or time.perf_counter()
                pieces += 1
                text.append(piece)
        return "".join(text), first, pieces


def cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def streams(count: int, tokens_per_s: float, num_tokens: int) -> float:
    """CPU share of the HTTP thread."""
    executor = Scripted(TEXT, tokens_per_s)
    engine = scripted(executor, num_tokens + 100)
    script = executor.script
    ids = [script[i % len(script)] for i in range(num_tokens)]
    wanted = etude().tokenizer.decode(ids)
    known = set(threading.enumerate())
    with running(lambda _: engine) as server:
        wait_until_ready(server)
        new = [t for t in threading.enumerate() if t not in known]
        (http,) = [t for t in new if t.name.startswith("Thread")]

        async def all_of_them() -> list[tuple[str, float, int]]:
            made = [await Connection.to(server) for _ in range(count)]
            found = await asyncio.gather(*(one.stream(num_tokens) for one in made))
            for one in made:
                one.writer.close()
            return found

        before, start = cpu_s(http), time.perf_counter()
        found = asyncio.run(all_of_them())
        share = (cpu_s(http) - before) / (time.perf_counter() - start)
    assert all(text == wanted for text, _, _ in found), "nothing is lost"
    # Written by time, not by token: about one piece a millisecond.
    assert all(pieces <= num_tokens / 2 for _, _, pieces in found)
    return share


def test_one_stream_of_10_000_tokens_a_second() -> None:
    share = streams(1, 10_000, 6000)
    assert share < 0.25


def test_eight_streams_of_2_000_tokens_a_second() -> None:
    share = streams(8, 2000, 1500)
    assert share < 0.4


def test_the_server_adds_about_a_millisecond_to_the_first_token() -> None:
    """Beside the engine: parsing, template, tokens, threads and sockets, the client's included."""
    executor = Scripted(TEXT, 1000, read_s=0.005)
    with running(lambda _: scripted(executor)) as server:
        wait_until_ready(server)

        async def added(connection: Connection) -> float:
            start = time.perf_counter()
            _, first, _ = await connection.stream(3)
            return first - executor.first + executor.asked - start

        async def several() -> list[float]:
            connection = await Connection.to(server)
            delays = [await added(connection) for _ in range(40)]
            connection.writer.close()
            return sorted(delays)

        delays = asyncio.run(several())
    # 0.8 ms, the client's part included, where the cores have nothing else to do.
    assert delays[0] < 0.002, f"at best {delays[0] * 1e3:.2f} ms"
