"""What a streamed answer of an OpenAI-compatible server says about speed. Pure.

Tokens are counted by the server: by the usage so far in each chunk, or by token ids. Chunks are
never counted, since one may hold any number of tokens. Times are seconds after the request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

# Chunks that were sent together arrive a little apart.
BURST_S = 0.001
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class Counting(StrEnum):
    """How tokens can be counted; the best of what a server offers comes first."""

    CONTINUOUS_USAGE = "usage in every chunk"
    TOKEN_IDS = "token ids"  # noqa: S105 - no password
    FINAL_USAGE = "usage at the end, of a long and a short request"
    NONE = "not at all"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream.

    Attributes:
        at_s: when it arrived.
        text: what it adds to the answer, of any kind.
        tokens_so_far: by its own usage; None where it has none.
        token_ids: that it holds; None where it tells none.
        is_last: it says why the answer ends, or comes after that.
    """

    at_s: float
    text: str
    tokens_so_far: int | None
    token_ids: tuple[int, ...] | None
    is_last: bool


@dataclass(frozen=True, slots=True)
class ServerTimings:
    """What a server's `timings` tell, llama.cpp's object and what Soloist adds to it.

    Attributes:
        tokens_per_s: decode speed by the server's own clock; None where it does not tell.
        mbu, bandwidth_gb_per_s: share of the memory bandwidth that decoding had, and that
            bandwidth; likewise.
    """

    tokens_per_s: float | None = None
    mbu: float | None = None
    bandwidth_gb_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole stream.

    Attributes:
        chunks: in order.
        prompt_tokens, new_tokens, cached_tokens: by the last usage; None where there is none.
        timings: by the server's own clock.
    """

    chunks: tuple[Chunk, ...]
    prompt_tokens: int | None
    new_tokens: int | None
    cached_tokens: int | None
    timings: ServerTimings = ServerTimings()

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def end_s(self) -> float:
        """When the server said that the answer ends; all its tokens were there then."""
        ends = [chunk.at_s for chunk in self.chunks if chunk.is_last]
        return ends[0] if ends else self.chunks[-1].at_s


@dataclass(frozen=True, slots=True)
class Arrival:
    """An instant at which new tokens were there, and how many there were in all, if it is known."""

    at_s: float
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens made after the first ones, and the time they took."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Decode speed."""
        return self.num_tokens / self.seconds


def read_answer(events: Sequence[tuple[float, str]]) -> Answer:
    """Read events: when each arrived, and its data.

    Raises:
        ValueError: no events, or data that is no JSON object.
        ServerSaid: the server reports an error in the stream.
    """
    chunks: list[Chunk] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    has_ended = False
    for at_s, data in events:
        if data == "[DONE]":
            break
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError(f"no JSON object: {data[:80]}")  # noqa: TRY004 - what a server sent
        if body.get("error"):
            raise ServerSaid(str(body["error"]))
        usage = body.get("usage") or usage
        timings = body.get("timings") or timings
        choice = (body.get("choices") or [{}])[0]
        has_ended |= bool(choice.get("finish_reason")) or not body.get("choices")
        chunks.append(_chunk(at_s, choice, body.get("usage"), is_last=has_ended))
    if not chunks:
        raise ValueError("it is empty")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    own = ServerTimings(
        timings.get("predicted_per_second"), timings.get("mbu"), timings.get("bandwidth_gb_per_s")
    )
    return Answer(
        tuple(chunks), usage.get("prompt_tokens"), usage.get("completion_tokens"), cached, own
    )


class ServerSaid(Exception):
    """An error inside a stream."""


def _chunk(
    at_s: float, choice: dict[str, Any], usage: dict[str, Any] | None, *, is_last: bool
) -> Chunk:
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), *(delta.get(name) for name in _TEXTS)]
    ids = choice.get("token_ids")
    return Chunk(
        at_s=at_s,
        text="".join(part if isinstance(part, str) else json.dumps(part) for part in parts if part),
        tokens_so_far=(usage or {}).get("completion_tokens"),
        token_ids=None if ids is None else tuple(ids),
        is_last=is_last,
    )


def counting_of(answer: Answer) -> Counting:
    """The best way that this answer offers; usage of the last chunks alone is not continuous."""
    before_the_end = [chunk for chunk in answer.chunks if not chunk.is_last]
    if any(chunk.tokens_so_far for chunk in before_the_end):
        return Counting.CONTINUOUS_USAGE
    if any(chunk.token_ids for chunk in before_the_end):
        return Counting.TOKEN_IDS
    return Counting.NONE if answer.new_tokens is None else Counting.FINAL_USAGE


def arrivals(answer: Answer, counting: Counting) -> list[Arrival]:
    """Instants at which the number of tokens rose; where it is unknown, at which text came."""
    found: list[Arrival] = []
    so_far = 0
    for chunk in answer.chunks:
        if counting is Counting.CONTINUOUS_USAGE:
            now = chunk.tokens_so_far or 0
        elif counting is Counting.TOKEN_IDS:
            now = so_far + len(chunk.token_ids or ())
        else:
            if chunk.text:
                found.append(Arrival(chunk.at_s, None))
            continue
        if now > so_far:
            so_far = now
            found.append(Arrival(chunk.at_s, now))
    return found


def first_burst(found: Sequence[Arrival]) -> Arrival:
    """The end of what came together with the first token."""
    return [a for a in found if a.at_s <= found[0].at_s + BURST_S][-1]


def decode_span(found: Sequence[Arrival]) -> Span | None:
    """From the end of the first burst to the last token; None without counts or a second burst."""
    if not found:
        return None
    first, last = first_burst(found), found[-1]
    if first.num_tokens is None or last.num_tokens is None or last is first:
        return None
    return Span(last.num_tokens - first.num_tokens, last.at_s - first.at_s)


def difference(long: Answer, short: Answer) -> Span | None:
    """The same from two requests that differ in length only: by how much the long one exceeds.

    Exact in tokens, which usage counts at both ends; None without usage or without a difference.
    """
    if long.new_tokens is None or short.new_tokens is None:
        return None
    span = Span(long.new_tokens - short.new_tokens, long.end_s - short.end_s)
    return span if span.num_tokens > 0 and span.seconds > 0 else None


def text_arrivals(long: Answer, short: Answer) -> list[Arrival]:
    """Instants at which text came, the first of them not before the only token of a short answer.

    Some servers send the prompt back before the first token; text that early holds no token.
    """
    found = arrivals(long, Counting.FINAL_USAGE)
    later = [a for a in found if a.at_s >= short.end_s]
    return later if len(later) == len(found) else [Arrival(short.end_s, None), *later]


def gaps_s(found: Sequence[Arrival]) -> list[float]:
    """Between each two instants."""
    return [b.at_s - a.at_s for a, b in pairwise(found)]


def token_times_s(found: Sequence[Arrival]) -> list[float]:
    """For each token after the first instant, its share of the gap before it."""
    times: list[float] = []
    for a, b in pairwise(found):
        if a.num_tokens is not None and b.num_tokens is not None:
            more = b.num_tokens - a.num_tokens
            times += [(b.at_s - a.at_s) / more] * more
    return times


def complete(values: Sequence[float | None]) -> list[float]:
    """The values, or none where one is missing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
