"""Thousands of random requests and disconnects: clear answers, nothing that stays behind."""

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace

from server.asgi import Exchange, application, is_idle
from server.running import Scripted, etude, scripted, with_tools
from server.values import LIKELY, junk
from soloist.engine import Engine, Request
from soloist.engine.kernel_executor import KernelExecutor
from soloist.kv.layout import PAGE_POSITIONS
from soloist.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from soloist.server.generation import Generation
from soloist.server.preparation.llama_cpp import InfillRequest, LlamaCppRequest
from soloist.server.preparation.messages import CountRequest, MessagesRequest
from soloist.server.preparation.ollama import OllamaChatRequest, OllamaGenerateRequest
from soloist.server.preparation.responses import ResponsesRequest
from unit.engine.fakes import VOCAB, Cache, FakeDecoder, FakeHost, FakePrefill

SIDE_BY_SIDE = 16
PATHS = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest, "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest, "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest, "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest, "/infill": InfillRequest,
    "/completion": LlamaCppRequest,
}  # fmt: skip


TEXTS = ("prompt", "messages", "content")


def request(rng: random.Random) -> tuple[str, dict[str, object]]:
    """A path and a body, of which a few values are wrong."""
    path, schema = rng.choice(list(PATHS.items()))
    names = list(schema.model_fields)
    if path == "/tokenize":  # its text is in one of several fields
        kept = rng.choice(TEXTS)
        names = [kept, *(name for name in names if name not in TEXTS)]
    body = {n: rng.choice(LIKELY[n]) for n in names if schema.model_fields[n].is_required()}
    if path == "/tokenize":
        body[kept] = rng.choice(LIKELY["messages"]) if kept == "messages" else "def"
    for name in rng.sample(names, min(len(names), rng.randrange(7))):
        body[name] = rng.choice(LIKELY[name]) if name in LIKELY else junk(rng)
    for name in rng.sample(names, rng.choice([0, 0, 0, 1, 2])):
        body[name] = junk(rng)
    if rng.random() < 0.05:
        body[rng.choice(["colour", "", "messages "])] = junk(rng)
    if rng.random() < 0.05 and body:
        del body[rng.choice(sorted(body))]
    if body.get("echo") is True and "logprobs" in body:
        del body["echo"]  # the scripted model scores no prompts
    return path, body


async def side_by_side(count: int, job: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run it so often, several at a time; none may hang."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            async with asyncio.timeout(30):
                await job()

    await asyncio.gather(*(worker() for _ in range(SIDE_BY_SIDE)))


def check_reply(found: Exchange, path: str, body: dict[str, object]) -> None:
    content = json.dumps(body)
    assert found.status in (200, 400, 404), (found.status, found.body, path, content)
    assert found.is_whole, (path, content)
    if found.status != 200:
        error = json.loads(found.body)["error"]
        assert error if path.startswith("/api/") else error["message"]
    elif path.startswith("/api/"):
        assert json.loads(found.body.splitlines()[-1])["done"] is True
    elif body.get("stream") is True and not path.endswith(("tokenize", "count_tokens")):
        last = found.body.rstrip().rpartition(b"\n\n")[2]
        ends = (b"[DONE]", b"response.completed", b"response.incomplete", b"message_stop")
        if path in ("/infill", "/completion"):
            ends = (b'"stop":true',) if not body.get("response_fields") else (b"data: {",)
        assert any(end in last for end in ends), (path, content, found.body[-300:])
    else:
        json.loads(found.body)


def of_one_kind(*kinds: type) -> Counter[str]:
    gc.collect()
    return Counter(type(x).__name__ for x in gc.get_objects() if type(x) in kinds)


def test_ten_thousand_requests_get_answers_or_clear_refusals() -> None:
    executor, rng = Scripted(), random.Random(20)
    # Most answers fill the context.
    engine, statuses = with_tools(executor, 128), Counter()
    before = of_one_kind(Generation, Request)

    async def one(app: object) -> None:
        path, body = request(rng)
        found = await Exchange(app, "POST", path, body).run()
        statuses[path, found.status] += 1
        check_reply(found, path, body)

    async def all_of_them() -> None:
        async with application(engine, most_waiting=10_000) as (app, _):
            tasks = len(asyncio.all_tasks())
            await side_by_side(10_000, lambda: one(app))
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == tasks, "no task stays"

    asyncio.run(all_of_them())
    assert sum(statuses.values()) == 10_000
    for path in PATHS:
        assert min(statuses[path, 200], statuses[path, 400]) > 30, statuses
    assert executor.num_open == 0
    assert not of_one_kind(Generation, Request) - before


def paged(num_pages: int) -> tuple[Engine, KernelExecutor]:
    """An engine over the real bookkeeping of pages, before a device that is none."""
    cache = Cache()
    executor = KernelExecutor(
        FakeDecoder(cache, 16, sequences=4), FakePrefill(cache, 64), num_pages, VOCAB, 64,
        keeps_prefixes=True, host=FakeHost(cache, 6),
    )  # fmt: skip
    engine = scripted(Scripted(), 600)
    small = replace(engine.config, vocab_size=VOCAB)
    return Engine(small, executor, engine.resolved, etude().report.folder, engine.report), executor


def test_a_thousand_disconnects_leave_no_sequence_and_every_page() -> None:
    rng, outcomes = random.Random(3), Counter()
    num_pages = 24  # of 4 sequences with up to 10 each
    engine, executor = paged(num_pages)
    before = of_one_kind(Generation, Request)

    async def one(app: object, host: object) -> None:
        is_stream = rng.random() < 0.6
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([3, 20, 90]))]]
        body = {
            "prompt": prompts * rng.choice([1, 1, 3]), "max_tokens": rng.choice([2, 60, 400]),
            "ignore_eos": True, "stream": is_stream, "temperature": rng.choice([0, 1]),
        }  # fmt: skip
        found = Exchange(app, "POST", "/v1/completions", body)
        task = asyncio.create_task(found.run())
        match rng.randrange(4):
            case 0:
                found.hang_up()
            case 1:
                await asyncio.sleep(rng.random() * 0.01)
            case 2 if is_stream:
                for _ in range(rng.randrange(1, 4)):
                    await asyncio.wait(
                        [task, asyncio.create_task(found.grows())],
                        return_when=asyncio.FIRST_COMPLETED, timeout=20,
                    )  # fmt: skip
            case _:
                await asyncio.sleep(0.001)
                for request_id in list(host.running)[:1]:
                    path = f"/v1/completions/{request_id}"
                    await Exchange(app, "DELETE", path).run()
        found.hang_up()
        await task
        outcomes["whole" if found.is_whole and found.status == 200 else "cut"] += 1

    async def all_of_them() -> None:
        async with application(engine, most_waiting=1000) as (app, host):
            await side_by_side(1000, lambda: one(app, host))
            while not is_idle(host):
                await asyncio.sleep(0.001)

    asyncio.run(all_of_them())
    assert outcomes["cut"] > 300, outcomes
    assert not of_one_kind(Generation, Request) - before
    allocator, cached = executor.allocator, executor.cached
    cached_pages = cached.on_device // PAGE_POSITIONS
    assert allocator.pages.num_free + cached_pages == num_pages, "every page came back"
    assert allocator.tiers.host_pages.num_free + cached.on_host // PAGE_POSITIONS == 6
    assert len(allocator._free_rows) == executor.max_running
