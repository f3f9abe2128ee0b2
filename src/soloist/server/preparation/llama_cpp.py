"""What llama.cpp's clients may send to /completion and /infill, and how it becomes a prompt."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from soloist.sampling.params import SamplingParams
from soloist.server.fields import (
    Fields,
    Harmless,
    Items,
    Number,
    SamplingFields,
    only,
    optional,
)
from soloist.server.preparation.llama_sampling import (
    SAMPLERS,
    LlamaSampling,
    require_penalties_of_all,
    sampler_names,
)
from soloist.server.preparation.prepared import Prepared, PreparedPrompt
from soloist.server.problems import unsupported
from soloist.server.prompts import fitted
from soloist.server.shapes import Shape, plain_grammar
from soloist.text.answers import json_form
from soloist.text.processor import Processor

# What stands before a repository's name and before each file, in models that were trained on them.
_FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))

_BY_DEFAULT = [name for name in SAMPLERS.values() if name != "infill"]


class LlamaCppFields(LlamaSampling):
    """What both ways to generate share."""

    model: str | None = None
    n_predict: int | None = optional(
        "Most tokens to generate; -1, the default: what fits. 0 only reads the prompt.", ge=-2
    )
    n_cmpl: int | None = optional(
        "Answers, 1 by default. More are one, which a warning says, where the best token is taken.",
        ge=1,
        le=64,
    )
    stream: bool | None = None
    samplers: str | Items[str] | None = optional(
        "Those that are used; infill takes the best token. Their order is Soloist's."
    )
    stop: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = optional("Do not stop at the model's end-of-sequence token.")
    json_schema: dict[str, Any] | None = optional("The form of the answer.")
    n_indent: int | None = optional("Ends before a line that is indented by less.", ge=0)
    t_max_predict_ms: Number | None = optional(
        "Ends an answer of more than a line so long after its first token."
    )
    return_tokens: bool | None = optional("Also return the token ids of the answer.")
    response_fields: Items[str] | None = optional(
        "Only these fields of the reply, such as timings/prompt_n."
    )
    grammar: only("") = None  # type: ignore[valid-type]
    top_n_sigma: only(-1, -1.0) = None  # type: ignore[valid-type]
    dynatemp_range: only(0, 0.0) = None  # type: ignore[valid-type]
    dynatemp_exponent: Harmless = None
    dry_multiplier: only(0, 0.0) = None  # type: ignore[valid-type]
    dry_base: Harmless = None
    dry_allowed_length: Harmless = None
    dry_penalty_last_n: Harmless = None
    xtc_probability: only(0, 0.0) = None  # type: ignore[valid-type]
    xtc_threshold: Harmless = None
    min_keep: only(0) = None  # type: ignore[valid-type]
    n_probs: only(0) = None  # type: ignore[valid-type]
    lora: only([]) = None  # type: ignore[valid-type]
    image_data: only([]) = None  # type: ignore[valid-type]
    timings_per_token: only(False) = None  # type: ignore[valid-type]
    cache_prompt: Harmless = None
    n_cache_reuse: Harmless = None
    n_keep: Harmless = None
    id_slot: Harmless = None
    t_max_prompt_ms: Harmless = None


class LlamaCppRequest(LlamaCppFields):
    """POST /completion."""

    prompt: str | Items[int] = Field(description="Text, or token ids.")


class Extra(Fields):
    """A piece of another file."""

    text: str
    filename: str | None = None
    time: Harmless = None


class InfillRequest(LlamaCppFields):
    """POST /infill."""

    input_prefix: str | None = optional("Text before the gap.")
    prompt: str | None = optional("More of it, behind input_prefix.")
    input_suffix: str | None = optional("Text after the gap.")
    input_extra: Items[Extra] | None = optional("Pieces of other files, which go first.")


def prepare_llama_cpp(
    processor: Processor, asked: LlamaCppRequest, model: str
) -> Prepared[LlamaCppRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    given = asked.prompt
    ids = given if isinstance(given, list) else processor.encode(given)
    return _prepared(processor, asked, model, ids)


def prepare_infill(
    processor: Processor, asked: InfillRequest, model: str
) -> Prepared[InfillRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered, or the model cannot fill in.
    """
    prefix, extras = (asked.input_prefix or "") + (asked.prompt or ""), asked.input_extra or []
    marks = _file_marks(processor)
    before = _marked(processor, extras, *marks) if extras and marks else []
    if not marks:
        prefix = "".join(extra.text.rstrip("\n") + "\n\n" for extra in extras) + prefix
    ids = processor.fim_prompt(prefix, asked.input_suffix or "")
    place = int(ids[0] == processor.tokenizer.bos_id)
    return _prepared(processor, asked, model, [*ids[:place], *before, *ids[place:]], marks)


def samplers_of(asked: LlamaCppFields) -> list[str]:
    """The names of the samplers that are used.

    Raises:
        Problem: there is no such sampler.
    """
    if asked.samplers is None:
        return _BY_DEFAULT
    return sampler_names(asked.samplers)


def _file_marks(processor: Processor) -> tuple[int, ...]:
    """Ids of the marks before a repository's name and before a file; none in most models."""
    for marks in _FILE_MARKS:
        ids = [processor.encode(mark, add_special_tokens=False) for mark in marks]
        if tuple(processor.tokenizer.token(one[0]) for one in ids) == marks:
            return tuple(one[0] for one in ids)
    return ()


def _marked(
    processor: Processor, extras: Sequence[Extra], repository_mark: int, file_mark: int
) -> list[int]:
    """Pieces of other files, and the mark before this one."""

    def encoded(text: str) -> list[int]:
        return processor.encode(text, add_special_tokens=False)

    ids = [repository_mark, *encoded("project\n")]
    for number, extra in enumerate(extras):
        name = extra.filename or f"file{number}"
        ids += [file_mark, *encoded(f"{name}\n{extra.text}\n")]
    return [*ids, file_mark, *encoded("current\n")]


def _prepared(
    processor: Processor,
    asked: LlamaCppFields,
    model: str,
    ids: list[int],
    end_ids: Sequence[int] = (),
) -> Prepared[Any]:
    """The request for what follows a prompt; the tokens `end_ids` end it, too."""
    # Reading a prompt gives a token, which is left out of the reply.
    wanted = 1 if asked.n_predict == 0 else asked.n_predict
    wanted = None if wanted in (-1, -2) else wanted
    params = fitted(processor, ids, _params(processor, asked, wanted, end_ids), wanted)
    shape = (
        None if asked.json_schema is None else Shape("json_schema", json_form(asked.json_schema))
    )
    grammar = plain_grammar(processor, shape)
    left_out = ("prompt", "input_prefix", "input_suffix", "input_extra", "json_schema", "stop")
    update = {name: None for name in left_out if name in type(asked).model_fields}
    fields = asked.model_copy(update=update | {"samplers": samplers_of(asked)})
    prompts = (PreparedPrompt(tuple(ids), params),)
    return Prepared(fields, model, prompts, grammar, warnings=_answer_warnings(asked, params))


def _answer_warnings(asked: LlamaCppFields, params: SamplingParams) -> tuple[str, ...]:
    """What a reply says about several answers, which are the same where the best token is taken.

    Raises:
        Problem: they would differ.
    """
    if asked.n_cmpl in (None, 1):
        return ()
    if params.temperature > 0:
        raise unsupported("n_cmpl", "1, or more with the sampler infill or temperature 0")
    return (f"n_cmpl is {asked.n_cmpl}, but answers of the best tokens are alike; this is one",)


def _params(
    processor: Processor, asked: LlamaCppFields, wanted: int | None, end_ids: Sequence[int]
) -> SamplingParams:
    names = samplers_of(asked)
    if "penalties" in names:
        require_penalties_of_all(asked, "repeat_last_n")

    def used(name: str, value: Any) -> Any:  # noqa: ANN401 - numbers of two kinds
        return value if name in names else None

    fields = SamplingFields(
        temperature=0 if "infill" in names else used("temperature", asked.temperature),
        top_k=used("top_k", asked.top_k),
        top_p=used("top_p", asked.top_p),
        min_p=used("min_p", asked.min_p),
        repetition_penalty=used("penalties", asked.repeat_penalty),
        presence_penalty=used("penalties", asked.presence_penalty),
        frequency_penalty=used("penalties", asked.frequency_penalty),
        seed=asked.chosen_seed,
        stop=asked.stop,
        stop_token_ids=list(end_ids),
        ignore_eos=asked.ignore_eos,
    )
    return fields.params(max(1, processor.context_tokens) if wanted is None else wanted)
