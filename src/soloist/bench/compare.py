"""`bench compare`: which rows of two result files measure the same, and what became slower. Pure.

Rows are compared as read from JSON, so that files of any age can be; fields that older files lack
have the values that were the only ones then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = Mapping[str, Any]
Verdict = Literal["faster", "same", "within spread", "slower", "lost", "new"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A field with a median and range over runs, and which direction is good."""

    field: str
    unit: str
    higher_is_better: bool


_DECODE = Figure("decode_tokens_per_s", "decode tokens/s", True)
_TTFT = Figure("ttft_ms", "TTFT ms", False)
FIGURES: dict[str, tuple[Figure, ...]] = {
    "decode": (_DECODE, _TTFT),
    "prefill": (_TTFT,),
    "serve": (_DECODE, _TTFT),
    "agent": (Figure("loop_s", "s a loop", False), _DECODE),
    "neighbours": (_DECODE, _TTFT),
    "startup": (Figure("total_s", "startup s", False),),
    "bandwidth": (Figure("gb_per_s", "read GB/s", True),),
    "rival": (_DECODE, _TTFT),
}
# What has to be equal, with the value where a file lacks the field.
_CONDITIONS: dict[str, dict[str, Any]] = {
    "decode": dict.fromkeys(
        ("shape", "device", "gpus", "precision", "prompt_tokens", "new_tokens", "columns")
    )
    | {"sequences": 1, "speculation": False, "busy_processes": 0}
    | {"drafting": "", "wrong": None, "temperature": 0.0, "kv": "", "text": ""}
    | {"predicted": None},
    "prefill": dict.fromkeys(
        ("shape", "device", "gpus", "precision", "prompt_tokens", "prefix", "cached_tokens")
    )
    | {"busy_processes": 0, "kv": "", "streams": 0},
    "serve": dict.fromkeys(("shape", "api", "prefix", "max_tokens")),
    "agent": dict.fromkeys(
        ("shape", "api", "turns", "asked_prompt_tokens", "tool_tokens", "max_tokens")
    ),
    "neighbours": dict.fromkeys(("shape", "api", "neighbour", "max_tokens")),
    "startup": dict.fromkeys(("shape", "device", "precision", "executor", "kernel_cache"))
    | {"program": "soloist run"},
    "bandwidth": dict.fromkeys(("device", "gpus", "method")),
    "rival": dict.fromkeys(("shape", "device", "weights", "prompt_tokens", "new_tokens"))
    | {"kept_tokens": 0},
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one pair of rows.

    Attributes:
        row: what both measure, in words.
        unit: of the figure.
        before, after: medians; None where there is none.
        change: after / before - 1, positive where the number is higher.
        verdict: 'within spread' is a change beyond the threshold that runs do not bear out; 'lost'
            a figure that is no more, 'new' one that was not.
    """

    row: str
    unit: str
    before: float | None
    after: float | None
    change: float | None
    verdict: Verdict

    @property
    def is_regression(self) -> bool:
        """Slower, or not there any more."""
        return self.verdict in ("slower", "lost")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two files.

    Attributes:
        differences: of all pairs.
        only_before, only_after: rows without partner, in words.
        apart: without a single pair, what keeps the two most alike rows apart.
    """

    differences: tuple[Difference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    apart: str = ""

    @property
    def regressions(self) -> tuple[Difference, ...]:
        """What became slower."""
        return tuple(d for d in self.differences if d.is_regression)


def compare(before: Sequence[Json], after: Sequence[Json], threshold: float) -> Comparison:
    """Pair rows and judge their figures.

    Rows with equal conditions and equal engines are partners; then those with equal conditions of
    different engines, where there is only one of them on each side.

    Args:
        before: rows of a result file.
        after: rows to hold against them.
        threshold: share by which a median may be worse.
    """
    pairs, left, right = _pairs(before, after)
    return Comparison(
        tuple(d for a, b in pairs for d in _differences(a, b, threshold)),
        tuple(describe(row) for row in left),
        tuple(describe(row) for row in right),
        "" if pairs else _apart(left, right),
    )


def conditions(row: Json) -> tuple[object, ...] | None:
    """What another row has to share to be its partner; None for kinds that are not compared."""
    kind = row.get("bench", "decode")
    if kind not in _CONDITIONS:
        return None
    return (kind, *_values(row).values())


def _apart(before: Sequence[Json], after: Sequence[Json]) -> str:
    """What keeps the two most alike rows of one kind from being partners; empty without any."""
    pairs = [
        (a, b)
        for a in before
        for b in after
        if a.get("bench", "decode") == b.get("bench", "decode") and conditions(a) is not None
    ]
    if not pairs:
        return ""
    a, b = min(pairs, key=lambda pair: len(_differing(*pair)))
    words = [f"{field} {was} and {now}" for field, (was, now) in _differing(a, b).items()]
    words = words or [f"engine {_engine(a)} and {_engine(b)}, and there are more alike"]
    return f"{describe(a)}: {', '.join(words)}"


def _differing(a: Json, b: Json) -> dict[str, tuple[object, object]]:
    theirs = _values(b)
    return {
        field: (value, theirs[field])
        for field, value in _values(a).items()
        if value != theirs[field]
    }


def _values(row: Json) -> dict[str, object]:
    """A row's conditions by field."""
    kind = row.get("bench", "decode")
    values = {field: row.get(field, default) for field, default in _CONDITIONS[kind].items()}
    if kind == "decode":
        start = row.get("start_position")
        values["start_position"] = row.get("prompt_tokens") if start is None else start
    if kind in ("decode", "prefill", "startup"):
        values["weights"] = own_weights(row)
    if kind == "serve":
        asked = row.get("asked_prompt_tokens")
        values["asked_prompt_tokens"] = row.get("prompt_tokens") if asked is None else asked
    if kind in ("serve", "agent", "neighbours"):
        # Servers call one model by its folder, its owner and name, or its name.
        values["shape"] = _model_name(row)
    return values


def describe(row: Json) -> str:
    """A row's conditions in words, its engine first."""
    kind = row.get("bench", "decode")
    words = [f"{kind}:", str(row.get("engine", "")), _model_name(row)]
    if kind in ("decode", "serve", "rival"):
        tokens = row.get("asked_prompt_tokens") or row.get("prompt_tokens")
        words.append(f"{tokens} + {row.get('new_tokens')}")
    if kind == "agent":
        words.append(f"{row.get('turns')} turns from {row.get('asked_prompt_tokens')}")
    if kind == "neighbours":
        words.append(f"beside {row.get('neighbour')}")
    if kind == "prefill":
        words.append(f"{row.get('prompt_tokens')} tokens")
    if row.get("gpus", 1) > 1:
        words.append(f"on {row['gpus']} GPUs")
    if row.get("columns", 1) != 1:
        words.append(f"{row['columns']} columns of {row.get('sequences', 1)}")
    words += _choices(row)
    if row.get("start_position") not in (None, row.get("prompt_tokens")):
        words.append(f"from {row['start_position']:,}")
    if "precision" in row and (weights := own_weights(row)):
        words.append(f"{weights} in")
    words += [str(row[field]) for field in ("precision", "prefix", "kernel_cache") if field in row]
    if row.get("program", "soloist run") != "soloist run":
        words.append(f"of {row['program']}")
    return " ".join(word for word in words if word)


def _choices(row: Json) -> list[str]:
    """What was kept and drafted, of which text, and what the KV cache is in, where not as usual."""
    words = []
    if row.get("kept_tokens"):
        words.append(f"with {row['kept_tokens']:,} kept")
    if row.get("drafting"):
        wrong = row.get("wrong")
        words.append(f"with {row['drafting']}" + (f", {wrong:.0%} wrong" if wrong else ""))
    if row.get("text"):
        words.append(f"of {row['text']}")
    if row.get("kv"):
        words.append(f"with a KV cache in {row['kv']}")
    return words


def own_weights(row: Json) -> str:
    """How weights are stored, if not in the row's precision, which older files do not say."""
    weights = row.get("weights", "")
    return "" if weights == row.get("precision") else str(weights)


def _model_name(row: Json) -> str:
    """Without owner and folder; where no model is measured, the device."""
    return str(row.get("shape", row.get("device", ""))).rstrip("/").rpartition("/")[2]


def _pairs(
    before: Sequence[Json], after: Sequence[Json]
) -> tuple[list[tuple[Json, Json]], list[Json], list[Json]]:
    left, right, pairs = list(before), list(after), []
    for row in before:
        same = [
            other for other in right if _engine(other) == _engine(row) and _are_alike(row, other)
        ]
        if same:
            pairs.append((row, same[0]))
            _remove(left, row)
            _remove(right, same[0])
    for row in list(left):
        here = [other for other in left if _are_alike(row, other)]
        there = [other for other in right if _are_alike(row, other)]
        if len(here) == len(there) == 1:
            pairs.append((row, there[0]))
            _remove(left, row)
            _remove(right, there[0])
    return pairs, left, right


def _engine(row: Json) -> object:
    return row.get("engine")


def _are_alike(a: Json, b: Json) -> bool:
    return conditions(a) is not None and conditions(a) == conditions(b)


def _remove(rows: list[Json], row: Json) -> None:
    """This very row, not one that is equal."""
    del rows[next(i for i, other in enumerate(rows) if other is row)]


def _differences(before: Json, after: Json, threshold: float) -> list[Difference]:
    name = describe(before)
    if _engine(before) != _engine(after):
        name += f" → {_engine(after)}"
    return [
        _difference(name, figure, before.get(figure.field), after.get(figure.field), threshold)
        for figure in FIGURES[before.get("bench", "decode")]
        if (before.get(figure.field), after.get(figure.field)) != (None, None)
    ]


def _difference(
    name: str, figure: Figure, before: Json | None, after: Json | None, threshold: float
) -> Difference:
    if before is None:
        assert after is not None, "one of them is there"
        return Difference(name, figure.unit, None, after["median"], None, "new")
    if after is None:
        return Difference(name, figure.unit, before["median"], None, None, "lost")
    was, now = before["median"], after["median"]
    change = now / was - 1 if was else 0.0
    verdict: Verdict = "same"
    if abs(change) > threshold:
        is_clear = not _holds(before, now) or not _holds(after, was)
        is_better = (change > 0) == figure.higher_is_better
        verdict = ("faster" if is_better else "slower") if is_clear else "within spread"
    return Difference(name, figure.unit, was, now, change, verdict)


def _holds(spread: Json, value: float) -> bool:
    return bool(spread["min"] <= value <= spread["max"])
