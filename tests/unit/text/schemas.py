"""Random JSON schemas, and a small check of values against them."""

import re
from typing import Any

from hypothesis import strategies as st

_NAMES = st.text('abé "\\_', min_size=1, max_size=4)
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-999, 999), st.text('aß\n"{}', max_size=4)
)


@st.composite
def _integers(draw) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = draw(st.none() | st.integers(-2000, 2000))
    if low is not None:
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["maximum"] = (low or 0) + draw(st.integers(0, 5000))
    return schema


@st.composite
def _texts(draw) -> dict[str, Any]:
    if draw(st.booleans()):
        return {
            "type": "string",
            "pattern": draw(st.sampled_from(["^a+b$", "^(x|yy){2}$", "^[0-9]{3}-?$"])),
        }
    low = draw(st.integers(0, 3))
    return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}


@st.composite
def _lists(draw, inner) -> dict[str, Any]:
    low = draw(st.integers(0, 2))
    return {
        "type": "array", "items": draw(inner), "minItems": low,
        "maxItems": low + draw(st.integers(0, 2)),
    }  # fmt: skip


@st.composite
def _objects(draw, inner) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves = st.one_of(
        _integers(),
        _texts(),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.lists(_SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
        _SCALARS.map(lambda value: {"const": value}),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _lists(inner),
            _objects(inner),
            st.lists(inner, min_size=1, max_size=2).map(lambda kinds: {"anyOf": kinds}),
        ),
        max_leaves=6,
    )


def fits(value: object, schema: dict[str, Any]) -> bool:
    """Whether a value keeps to a schema of those that are drawn here."""
    match schema:
        case {"anyOf": kinds}:
            return any(fits(value, kind) for kind in kinds)
        case {"enum": values}:
            return any(_same(value, x) for x in values)
        case {"const": wanted}:
            return _same(value, wanted)
        case {"type": "boolean" | "null" as kind}:
            return value is None if kind == "null" else isinstance(value, bool)
        case {"type": "integer"}:
            low, high = schema.get("minimum", value), schema.get("maximum", value)
            return type(value) is int and low <= value <= high
        case {"type": "string", "pattern": pattern}:
            return isinstance(value, str) and re.search(pattern, value) is not None
        case {"type": "string"}:
            return (
                isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
            )
    return _fits_inside(value, schema)


def _fits_inside(value: object, schema: dict[str, Any]) -> bool:
    if schema["type"] == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(fits(item, schema["items"]) for item in value)
        )
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(properties)
        and all(fits(value[name], properties[name]) for name in value)
    )


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b
