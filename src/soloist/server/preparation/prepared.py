"""What comes of a request's body: what to ask of the engine, and what the reply needs to know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from soloist.sampling.params import SamplingParams, Scores
from soloist.server.fields import Fields
from soloist.text.parts import PartFormat

Wanted = TypeVar("Wanted", bound=Fields)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready for the engine; see `EngineLoop.submit`."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    top_logprobs: int | None = None
    shown_ids: frozenset[int] = frozenset()
    scores: Scores = "answer"
    prediction_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Wanted]):
    """A request that was read.

    Attributes:
        fields: of the request; those that only make the prompt are left out.
        model: the name to reply with.
        prompts: ready for the engine.
        grammar: of every answer, for `Grammars.compile`; None where anything goes.
        style: how answers are taken apart.
        prompt_end: the end of the prompt's text, which tells whether an answer begins within
            reasoning.
        warnings: sentences for the reply about what was left out.
    """

    fields: Wanted
    model: str
    prompts: tuple[PreparedPrompt, ...]
    grammar: str | None = None
    style: PartFormat = field(default_factory=lambda: PartFormat(None, thinks=False))
    prompt_end: str = ""
    warnings: tuple[str, ...] = ()


def with_warnings(body: Mapping[str, object], warnings: Sequence[str]) -> dict[str, object]:
    """A reply that says what was left out of its request, if anything was."""
    return {**body, "warnings": list(warnings)} if warnings else dict(body)
