"""The Jinja environment in which chat templates run, equal to the one in transformers.

Templates come with a model and are not trusted: they run in a sandbox, on plain JSON values only.
Knows nothing of messages.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Refusal(TemplateError):
    """A template's own sentence about why it cannot render a conversation."""


def environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The environment; `now` is what `strftime_now` reads the clock with."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": partial(_strftime_now, now),
        "dict": _PlainDict(),
        "namespace": _PlainNamespace,
    }
    return made


class _GenerationBlock(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the assistant's words for training.

    For rendering the mark means nothing but a scope of its own.
    """

    tags = {"generation"}  # noqa: RUF012 – the way jinja2 declares tags

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _PlainDict:
    """`dict(…)` for templates, without the class behind it."""

    def __call__(self, *args: Mapping[Any, object], **fields: object) -> dict[Any, object]:
        return dict(*args, **fields)

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """`namespace(…)` for templates; attributes that begin with an underscore are refused."""

    def __init__(*args: object, **fields: object) -> None:
        self, *values = args  # unnamed, because a template may set a field called `self`
        fields = dict(*values, **fields)
        for name in fields:
            _check_attribute(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: object) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the attribute '{name}'")


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001 – templates give these by position, too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001
) -> str:
    """JSON as models read it; Jinja's own filter would escape `<`, `>`, `&` and `'`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(sentence: str) -> NoReturn:
    raise Refusal(sentence)


def _strftime_now(now: Callable[[], datetime], form: str) -> str:
    return now().strftime(form)
