"""Sampling as llama.cpp names it, and Ollama, which runs it."""

from collections.abc import Sequence

from pydantic import Field

from soloist.server.fields import (
    Fields,
    Harmless,
    Number,
    SamplingFields,
    bounded,
    only,
    optional,
)
from soloist.server.problems import invalid, unsupported

# Letters and names of llama.cpp's samplers.
SAMPLERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip

_RANDOM_SEEDS = (-1, 2**32 - 1)


class LlamaSampling(Fields):
    """Fields that both have; a field that is left out has Soloist's default."""

    temperature: Number | None = bounded("0 is greedy; default 1.", minimum=0, maximum=100)
    top_k: int | None = bounded("0 or -1 keeps all tokens, as by default.", minimum=-1)
    top_p: Number | None = bounded(
        "Above 0, at most 1, the default.", exclusiveMinimum=0, maximum=1
    )
    min_p: Number | None = bounded("0 … 1; default 0.", minimum=0, maximum=1)
    repeat_penalty: float | None = Field(
        default=None, gt=0, le=100, description="Of prompt and answer; default 1."
    )
    repeat_last_n: int | None = optional(
        "Beside a penalty only -1, which stands for all tokens.", ge=-1
    )
    presence_penalty: Number | None = bounded("-2 … 2; default 0.", minimum=-2, maximum=2)
    frequency_penalty: Number | None = bounded("-2 … 2; default 0.", minimum=-2, maximum=2)
    seed: int | None = bounded(
        "-1: another one each time. The same seed gives the same text.", minimum=-1
    )
    typical_p: only(1, 1.0) = None  # type: ignore[valid-type]
    mirostat: only(0) = None  # type: ignore[valid-type]
    mirostat_tau: Harmless = None
    mirostat_eta: Harmless = None

    @property
    def chosen_seed(self) -> int | None:
        """The seed, if the request chose one."""
        return None if self.seed in _RANDOM_SEEDS else self.seed


def sampler_names(given: str | Sequence[str]) -> list[str]:
    """The names of samplers, which may be given as letters.

    Raises:
        Problem: there is no such sampler.
    """
    names = [SAMPLERS.get(one, one) for one in given]
    names = ["typ_p" if name == "typical_p" else name for name in names]
    if unknown := set(names) - set(SAMPLERS.values()):
        allowed = ", ".join(SAMPLERS.values())
        raise invalid("samplers", f"no sampler {min(unknown)!r} (available: {allowed})")
    return names


def require_all_listed(asked: SamplingFields, given: Sequence[str] | None) -> None:
    """Refuse a list of samplers that leaves out one whose field has an effect.

    Raises:
        Problem: it does, or there is no such sampler.
    """
    if given is None:
        return
    names = sampler_names(given)
    if "infill" in names:
        raise unsupported("samplers", "samplers but infill, which takes the best token")
    used = {
        "temperature": asked.temperature not in (None, 1),
        "top_k": asked.top_k not in (None, 0, -1),
        "top_p": asked.top_p not in (None, 1),
        "min_p": asked.min_p not in (None, 0),
        "penalties": bool(asked.presence_penalty or asked.frequency_penalty)
        or asked.repetition_penalty not in (None, 1),
    }
    for name, is_used in used.items():
        if is_used and name not in names:
            raise invalid("samplers", f"the list leaves out {name}, whose field is given")


def require_penalties_of_all(asked: LlamaSampling, field: str) -> None:
    """Refuse penalties that count the last tokens only.

    Args:
        asked: how tokens are chosen.
        field: where `repeat_last_n` stands in the request.

    Raises:
        Problem: they do.
    """
    has_penalties = asked.repeat_penalty not in (None, 1) or bool(
        asked.presence_penalty or asked.frequency_penalty
    )
    if has_penalties and asked.repeat_last_n not in (None, -1):
        raise unsupported(field, "-1, since penalties count all tokens")
