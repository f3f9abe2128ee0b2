"""What Ollama's clients may send, and how it becomes a prompt."""

from typing import Annotated, Any

from pydantic import Field

from soloist.sampling.params import SamplingParams
from soloist.server.fields import (
    Fields,
    Harmless,
    Items,
    SamplingFields,
    only,
    optional,
)
from soloist.server.ollama_conversation import plain_conversation
from soloist.server.part_formats import PROMPT_END, check_tools, part_format, shown_ids
from soloist.server.preparation.llama_sampling import LlamaSampling, require_penalties_of_all
from soloist.server.preparation.prepared import Prepared, PreparedPrompt
from soloist.server.problems import invalid, unsupported
from soloist.server.prompts import fitted, for_template
from soloist.server.reasoning import reasoning_variables
from soloist.server.shapes import Shape, ToolChoice, ToolUse, grammar_of, plain_grammar
from soloist.text.answers import json_form, object_form
from soloist.text.processor import Processor

_NO_END = (None, -1, -2)  # of `num_predict`: as many tokens as fit the context


class Options(LlamaSampling):
    """`options`: how tokens are chosen, and how Ollama would place the model."""

    num_predict: int | None = optional(
        "Most tokens to generate; -1, the default: what fits.", ge=-2
    )
    num_ctx: int | None = optional("Room that is needed, at most the context's.", ge=1)
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    tfs_z: only(1, 1.0) = None  # type: ignore[valid-type]
    penalize_newline: only(True) = None  # type: ignore[valid-type]
    logits_all: only(False) = None  # type: ignore[valid-type]
    vocab_only: only(False) = None  # type: ignore[valid-type]
    embedding_only: only(False) = None  # type: ignore[valid-type]
    num_keep: Harmless = None
    num_batch: Harmless = None
    num_gpu: Harmless = None
    main_gpu: Harmless = None
    num_thread: Harmless = None
    numa: Harmless = None
    low_vram: Harmless = None
    f16_kv: Harmless = None
    use_mmap: Harmless = None
    use_mlock: Harmless = None


class OllamaFields(Fields):
    """What both ways to generate share."""

    model: str
    stream: bool | None = optional("Default true.")
    options: Options | None = None
    format: str | dict[str, Any] | None = optional("'json', or a JSON schema.")
    keep_alive: Harmless = None
    think: bool | str | None = optional("true or false, for models that reason.")
    images: only([]) = None  # type: ignore[valid-type]
    logprobs: only(False) = None  # type: ignore[valid-type]
    top_logprobs: only(0) = None  # type: ignore[valid-type]
    truncate: only(False) = None  # type: ignore[valid-type]
    shift: only(False) = None  # type: ignore[valid-type]


class OllamaChatRequest(OllamaFields):
    """POST /api/chat."""

    messages: Items[dict[str, Any]] | None = optional("None: only says that the model is loaded.")
    tools: Items[dict[str, Any]] | None = optional("For models whose calls can be read.")


class OllamaGenerateRequest(OllamaFields):
    """POST /api/generate."""

    prompt: str | None = optional("None: only says that the model is loaded.")
    suffix: str | None = optional("Text after the gap, for models trained to fill in the middle.")
    system: str | None = None
    raw: bool | None = optional("The prompt is continued as it is, without the chat template.")
    template: only("") = None  # type: ignore[valid-type]
    context: only([]) = None  # type: ignore[valid-type]


class ShowRequest(Fields):
    """POST /api/show."""

    model: str
    verbose: Harmless = None


def prepare_ollama_chat(
    processor: Processor, asked: OllamaChatRequest, model: str
) -> Prepared[OllamaChatRequest]:
    """What to ask of the engine; no prompt where there are no messages.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    if not asked.messages:
        return _nothing(asked, model)
    tools = asked.tools or []
    check_tools(dict(enumerate(tools)))
    chat = plain_conversation(asked.messages, processor.chat_template.source)
    return _answering(processor, asked, model, chat, tools)


def prepare_ollama_text(
    processor: Processor, asked: OllamaGenerateRequest, model: str
) -> Prepared[OllamaGenerateRequest]:
    """What to ask of the engine; no prompt where there is no text.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    text = asked.prompt or ""
    if not text and not asked.suffix:
        return _nothing(asked, model)
    if not asked.raw and not asked.suffix:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        return _answering(processor, asked, model, [*system, {"role": "user", "content": text}], [])
    other = "raw" if asked.raw else "suffix"
    for name in ("system", "think"):
        if getattr(asked, name):
            raise unsupported(f"{name} beside {other}", "one of the two")
    if asked.raw and asked.suffix:
        raise unsupported("suffix beside raw", "one of the two")
    params, wanted = _params(processor, asked)
    ids = processor.fim_prompt(text, asked.suffix) if asked.suffix else processor.encode(text)
    params = fitted(processor, ids, params, wanted)
    grammar = plain_grammar(processor, _shape(asked))
    return Prepared(_short(asked), model, (PreparedPrompt(tuple(ids), params),), grammar)


def prepare_show(_: Processor, asked: ShowRequest, model: str) -> Prepared[ShowRequest]:
    """The model that is asked about."""
    return Prepared(asked, model, ())


def _nothing(asked: OllamaFields, model: str) -> Prepared[Any]:
    """Clients load a model by a request without a prompt, and end it with a time of 0."""
    if asked.keep_alive in (0, "0", "0s", "0m"):
        raise unsupported(
            "keep_alive", "another time; the model stays loaded until the server ends"
        )
    return Prepared(_short(asked), model, ())


def _answering(
    processor: Processor,
    asked: OllamaFields,
    model: str,
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]],
) -> Prepared[Any]:
    """The request for what follows a conversation."""
    params, wanted = _params(processor, asked)
    style, last = part_format(processor, tools), chat[-1]
    text = processor.chat_template.render(
        for_template(processor, chat),
        tools=tools or None,
        # A message of the assistant at the end is the beginning of its answer.
        continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
        variables=_thinking(processor, asked),
    )
    ids = processor.encode(text, add_special_tokens=False)
    params, end = fitted(processor, ids, params, wanted), text[-PROMPT_END:]
    strict = frozenset(n for n, tool in enumerate(tools) if tool["function"].get("strict"))
    field = "tools[{}].function.parameters"
    use = ToolUse(
        tools, range(len(tools)), strict, ToolChoice("auto"), several=True, schema_field=field
    )
    grammar = grammar_of(processor, _shape(asked), use, style, end)
    one = PreparedPrompt(tuple(ids), params, shown_ids=shown_ids(processor, style))
    return Prepared(_short(asked), model, (one,), grammar, style, end)


def _params(processor: Processor, asked: OllamaFields) -> tuple[SamplingParams, int | None]:
    """How tokens are chosen, and the most that are wanted; None: as many as fit."""
    options = asked.options or Options()
    if options.num_ctx is not None and options.num_ctx > processor.context_tokens:
        told = f"{options.num_ctx:,} (allowed: at most {processor.context_tokens:,}, the context)"
        raise invalid(
            "options.num_ctx", f"{told}; leave it out, or start the server with --context"
        )
    wanted = None if options.num_predict in _NO_END else options.num_predict
    if wanted == 0:
        raise invalid("options.num_predict", "0 (allowed: at least 1, or -1 for what fits)")
    require_penalties_of_all(options, "options.repeat_last_n")
    fields = SamplingFields(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.chosen_seed,
        stop=options.stop,
    )
    return fields.params(max(1, processor.context_tokens) if wanted is None else wanted), wanted


def _shape(asked: OllamaFields) -> Shape | None:
    match asked.format:
        case None | "":
            return None
        case "json":
            return Shape("format", object_form())
        case dict(schema):
            return Shape("format", json_form(schema))
    raise unsupported("format", "'json', or a JSON schema")


def _thinking(processor: Processor, asked: OllamaFields) -> dict[str, Any]:
    """The template's switch for reasoning."""
    match asked.think:
        case None:
            return {}
        case bool():
            return reasoning_variables(processor, "think", "medium" if asked.think else "none")
    raise unsupported("think", "true, false")


def _short(asked: OllamaFields) -> Any:  # noqa: ANN401 - one of two kinds of request
    """The same without what is of no use to the reply."""
    left_out = ("messages", "tools", "prompt", "suffix", "system", "format", "options")
    return asked.model_copy(update={k: None for k in left_out if k in type(asked).model_fields})
