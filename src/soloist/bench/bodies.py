"""Requests that cost a server much to read: each has one field far larger than people send. Pure.

All are JSON, and all but the nested one follow the types of /v1/completions: a server may answer or
refuse them, but somebody will send them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from soloist.bench.text import python_characters

_STOP_CHARACTERS = 240_000
_CHOICE_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of body.

    Attributes:
        told: what it is, of the size that is measured.
        count: of units in a body of that size.
        fields: the fields with so many units, as JSON without the braces around them.
    """

    told: str
    count: int
    fields: Callable[[int], bytes]

    def body(self, model: str, count: int | None = None) -> bytes:
        """A greedy request for one token.

        Args:
            model: as the server calls it.
            count: of units; None for the size that is measured.
        """
        told = json.dumps({"model": model, "max_tokens": 1, "temperature": 0})[1:-1].encode()
        return b"{%s,%s}" % (told, self.fields(self.count if count is None else count))


def _text(count: int) -> bytes:
    return b'"prompt":' + json.dumps(python_characters(count)).encode()


def _word(count: int) -> bytes:
    return b'"prompt":"%s"' % (b"a" * count)


def _objects(count: int) -> bytes:
    return b'"prompt":[%s]' % _listed(b'{"a":1}', count)


def _stops(count: int) -> bytes:
    one = json.dumps(python_characters(_STOP_CHARACTERS)).encode()
    return b'"prompt":"x","stop":[%s]' % _listed(one, count)


def _unknown(count: int) -> bytes:
    named = "".join(f',"f{i}":0' for i in range(count))
    return b'"prompt":"x"%s' % named.encode()


def _bias(count: int) -> bytes:
    entries = ",".join(f'"{i}":1' for i in range(count))
    return b'"prompt":"x","logit_bias":{%s}' % entries.encode()


def _ids(count: int) -> bytes:
    return b'"prompt":[%s]' % _listed(b"1", count)


def _choices(count: int) -> bytes:
    texts = ",".join(f'"{i:0{_CHOICE_CHARACTERS}d}"' for i in range(count))
    return b'"prompt":"x","guided_choice":[%s]' % texts.encode()


def _nested(count: int) -> bytes:
    return b'"prompt":%s%s' % (b"[" * count, b"]" * count)


def _listed(one: bytes, count: int) -> bytes:
    return (one + b",") * (count - 1) + one if count else b""


KINDS: Mapping[str, Kind] = {
    "text-2mb": Kind("text of 2 MB", 2_000_000, _text),
    "text-30mb": Kind("text of 30 MB", 30_000_000, _text),
    "word": Kind("one word of 20 MB", 20_000_000, _word),
    "objects": Kind("3.5 million objects as the prompt", 3_500_000, _objects),
    "stops": Kind("64 stop strings of 240 kB", 64, _stops),
    "fields": Kind("1.6 million unknown fields", 1_600_000, _unknown),
    "bias": Kind("2.5 million entries of logit_bias", 2_500_000, _bias),
    "ids": Kind("10 million token ids", 10_000_000, _ids),
    "choices": Kind("guided_choice of 100,000 texts", 100_000, _choices),
    "nesting": Kind("lists a million deep", 1_000_000, _nested),
}
