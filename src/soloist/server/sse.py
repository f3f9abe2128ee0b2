"""Server-sent events: bytes on their way to a client, and the reply that carries them."""

from collections.abc import AsyncIterator, Callable, Mapping

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from soloist.errors import SoloistError
from soloist.server.generation import Generation, watch
from soloist.server.problems import Problem, problem_of

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: Mapping[str, object], name: str | None = None) -> bytes:
    """One event; Anthropic's clients want it to have a name."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def event_with(data: Mapping[str, object], more: bytes) -> bytes:
    """One event; `more` is JSON of further fields, such as `,"usage":null`, or nothing."""
    return b"data: " + orjson.dumps(data)[:-1] + more + b"}\n\n"


class Events(StreamingResponse):
    """A stream of events made from running answers.

    An error on the way is an event, too, and then the stream ends; never a silent end. The answers
    end when the client goes away, even while nothing is written.

    Args:
        generation: the answers.
        body: the events.
        last_words: the event of an error; default: as OpenAI's clients read it.
        media_type: of the events.
    """

    def __init__(
        self,
        generation: Generation,
        body: AsyncIterator[bytes],
        last_words: Callable[[Problem], bytes] = lambda problem: event(problem.body()),
        media_type: str = "text/event-stream",
    ) -> None:
        told = _with_errors(body, last_words)
        super().__init__(told, media_type=media_type, headers=_HEADERS)
        self._generation = generation

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        async with self._generation:
            watcher = watch(receive, self._generation)
            try:
                await self.stream_response(send)
            finally:
                watcher.cancel()


async def _with_errors(
    body: AsyncIterator[bytes], last_words: Callable[[Problem], bytes]
) -> AsyncIterator[bytes]:
    try:
        async for part in body:
            yield part
    except (Problem, SoloistError) as error:
        yield last_words(problem_of(error))
