"""Sampling as llama.cpp names it, and Ollama, which runs it."""

from pydantic import Field

from soloist.server.fields import Fields, Harmless, Number, only, optional
from soloist.server.problems import unsupported


class LlamaSampling(Fields):
    """Fields that both have; a field that is left out has Soloist's default."""

    temperature: Number | None = optional("0 is greedy; default 1.")
    top_k: int | None = optional("0 or -1 keeps all tokens, as by default.")
    top_p: Number | None = optional("Above 0, at most 1, the default.")
    min_p: Number | None = optional("0 … 1; default 0.")
    repeat_penalty: Number | None = Field(
        default=None, gt=0, le=100, description="Of prompt and answer; default 1."
    )
    repeat_last_n: int | None = optional("Beside a penalty only -1, which stands for all tokens.")
    presence_penalty: Number | None = optional("-2 … 2; default 0.")
    frequency_penalty: Number | None = optional("-2 … 2; default 0.")
    typical_p: only(1, 1.0) = None  # type: ignore[valid-type]
    mirostat: only(0) = None  # type: ignore[valid-type]
    mirostat_tau: Harmless = None
    mirostat_eta: Harmless = None


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
