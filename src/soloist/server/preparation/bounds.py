"""How large each field of a request may be, before anything else looks at it.

Checks that come later name what is wrong with a value, and take time and memory for each part of
it. So a body is first held to these bounds, which cost next to nothing. Texts that become part of
the prompt are bounded by what the context holds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from soloist.server.problems import Problem, unsupported

# Objects and lists in a body: each takes up to 25 times the bytes that it has as JSON.
MOST_CONTAINERS = 200_000


@dataclass(frozen=True, slots=True)
class Bound:
    """The size of a field.

    Attributes:
        values: that it may hold, names of fields within it not counted.
        num_bytes: of all texts in it, names of fields included; None where the context says so.
    """

    values: int
    num_bytes: int | None


_NUMBER = Bound(16, 256)
_WORD = Bound(16, 1024)
_UNREAD = Bound(1024, 65_536)
_CONVERSATION = Bound(200_000, None)
_TEXT = Bound(1, None)
_SCHEMA = Bound(100_000, 2**20)

# By name, which means the same in every kind of request.
BOUNDS: dict[str, Bound] = {
    # what is said
    "messages": _CONVERSATION, "input": _CONVERSATION, "system": _CONVERSATION,
    "images": _CONVERSATION, "instructions": _TEXT, "suffix": _TEXT, "template": _TEXT,
    "input_prefix": _TEXT, "input_suffix": _TEXT, "content": _TEXT,
    "input_extra": Bound(10_000, None), "image_data": Bound(10_000, None),
    "prediction": Bound(10_000, None),
    "prompt": Bound(2**24, None), "tokens": Bound(2**20, 1024), "context": Bound(2**20, 1024),
    "tools": Bound(100_000, 2**22),
    "chat_template_kwargs": Bound(4096, 65_536),
    # what an answer looks like
    "response_format": _SCHEMA, "structured_outputs": _SCHEMA, "guided_json": _SCHEMA,
    "text": _SCHEMA, "output_config": _SCHEMA, "format": _SCHEMA, "json_schema": _SCHEMA,
    "grammar": Bound(1, 2**18), "response_fields": Bound(256, 8192),
    "guided_regex": Bound(1, 65_536), "guided_grammar": Bound(1, 2**18),
    "guided_choice": Bound(10_000, 2**18),
    # how tokens are chosen, and when an answer ends
    "stop": Bound(64, 4096), "stop_sequences": Bound(64, 4096),
    "stop_token_ids": Bound(256, 1024), "logit_bias": Bound(4096, 65_536),
    "options": Bound(256, 8192),
    # what has no effect, or is given back
    "user": _UNREAD, "metadata": _UNREAD, "store": _UNREAD, "service_tier": _UNREAD,
    "safety_identifier": _UNREAD, "prompt_cache_key": _UNREAD, "cache_control": _UNREAD,
    "prompt_cache_retention": _UNREAD, "cache_prompt": _UNREAD, "client_metadata": _UNREAD,
    # what is off, and refused by name where it is not
    "bad_words": _UNREAD, "documents": _UNREAD, "chat_template": _UNREAD, "mcp_servers": _UNREAD,
    # words, and objects of a few
    "model": _WORD, "tool_choice": _WORD, "stream_options": _WORD, "include": _WORD,
    "reasoning": _WORD, "thinking": _WORD, "context_management": _WORD, "truncation": _WORD,
    "functions": _WORD, "function_call": _WORD, "modalities": _WORD, "audio": _WORD,
    "reasoning_effort": _WORD, "verbosity": _WORD, "background": _WORD,
    "web_search_options": _WORD, "previous_response_id": _WORD, "conversation": _WORD,
    "think": _WORD, "keep_alive": _WORD, "samplers": _WORD, "lora": _WORD,
}  # fmt: skip


def bound_of(name: str) -> Bound:
    """Of a field; one that is not in the table is a number or a switch."""
    return BOUNDS.get(name, _NUMBER)


def check_body(body: bytes | bytearray) -> None:
    """Refuse a body of more objects and lists than any request needs.

    Raises:
        Problem: 400.
    """
    if body.count(b"{") + body.count(b"[") <= MOST_CONTAINERS:
        return
    bare = re.sub(rb'"(?:[^"\\]|\\.)*+"', b"", body, flags=re.DOTALL)  # brackets in texts are none
    if (found := bare.count(b"{") + bare.count(b"[")) > MOST_CONTAINERS:
        raise Problem(
            400,
            f"the body has {found:,} objects and lists (allowed: at most {MOST_CONTAINERS:,})",
            code="too_large",
        )


def check_fields(given: Mapping[str, object], schema: type[BaseModel]) -> None:
    """Refuse fields that are not known, and those that are too large.

    Args:
        given: the body.
        schema: of the request.

    Raises:
        Problem: 400, naming the field.
    """
    for name, value in given.items():
        if name not in schema.model_fields:
            raise unsupported(name)
        _check(name, value)


def _check(name: str, value: object) -> None:
    bound = bound_of(name)
    num_values = num_bytes = 0
    # A level at a time, a list of lists: sizes are known before anything is walked.
    left: list[object] = [value]
    while left:
        item = left.pop()
        match item:
            case str():
                num_bytes += len(item) if item.isascii() else len(item.encode(errors="replace"))
            case dict():
                num_values += len(item)
                num_bytes += sum(map(len, item))
            case list():
                num_values += len(item)
        if num_values > max(1, bound.values):
            raise _too_large(name, f"{num_values:,} values", f"{bound.values:,}")
        if bound.num_bytes is not None and num_bytes > bound.num_bytes:
            raise _too_large(name, f"{num_bytes:,} bytes of text", f"{bound.num_bytes:,}")
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list) and not _are_numbers(item):
            left += item


def _are_numbers(items: list[object]) -> bool:
    return not set(map(type, items)) & {str, list, dict}


def _too_large(name: str, found: str, allowed: str) -> Problem:
    return Problem(
        400,
        f"{name} holds at least {found} (allowed: at most {allowed})",
        param=name,
        code="too_large",
    )
