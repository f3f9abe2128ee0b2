"""What requests may hold, field by field. A field that is not here is refused by name.

`null` stands for a field's default everywhere, as clients write it.
"""

import json
import re
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from soloist.sampling.params import SamplingParams
from soloist.server.problems import invalid, unsupported

MOST_TOP_LOGPROBS = 20
MOST_CHOICES = 64

# How much a model reasons. Models of two states reason from `low` on.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT_TOLD = "none and minimal switch a model's reasoning off, the others on."

Item = TypeVar("Item")
# Checking ends at the first item that does not fit, however many there are.
Items = Annotated[list[Item], Field(fail_fast=True)]


class Fields(BaseModel):
    """A request or a part of one: no other fields, no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """As the values that are not null, for another process: few of many."""
        given = {name: value for name, value in self.__dict__.items() if value is not None}
        return _unpickled, (type(self), given)


def _unpickled(kind: type[Fields], given: dict[str, Any]) -> Fields:
    """A request that was checked before."""
    # What pydantic's own `model_construct` does, in a tenth of the time: all defaults are null.
    made = kind.__new__(kind)
    object.__setattr__(made, "__dict__", dict.fromkeys(kind.model_fields) | given)
    object.__setattr__(made, "__pydantic_fields_set__", set(given))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


def only(*allowed: object) -> Any:  # noqa: ANN401 - a type for pydantic
    """A field that is known, but of which only values are taken that change nothing."""

    def check(value: object) -> object:
        # Null within an object stands for a default, too.
        given = {k: v for k, v in value.items() if v is not None} if type(value) is dict else value
        if given is None or any(_is_same(given, x) for x in allowed):
            return value
        raise PydanticCustomError("not_supported", "is not supported", {"allowed": shown})

    shown = ", ".join(map(json.dumps, allowed)) or "leave it out"
    text = f"Not supported (allowed: {shown})."
    return Annotated[Any, AfterValidator(check), Field(description=text)]


def _is_same(given: object, allowed: object) -> bool:
    """Whether the two are one value in JSON, where 1 is 1.0 and not true."""
    return given == allowed and isinstance(given, bool) == isinstance(allowed, bool)


# Sent by clients and of no effect on what they get from one server with one model.
Harmless = Annotated[Any, Field(description="Accepted; has no effect.")]
Number = int | float

# No vocabulary has longer ones.
_TOKEN_ID = re.compile("[0-9]{1,10}")


def optional(told: str, *, ge: int | None = None, le: int | None = None) -> Any:  # noqa: ANN401
    """A field that may be left out: what it means, and the bounds of a number."""
    return Field(default=None, description=told, ge=ge, le=le)


def bounded(text: str, **bounds: int) -> Any:  # noqa: ANN401
    """A number that may be left out; `SamplingParams` holds it to the bounds that are told here."""
    return Field(default=None, description=text, json_schema_extra=bounds)  # type: ignore[arg-type]


class StreamOptions(Fields):
    """What a stream carries in addition to text."""

    include_usage: bool | None = optional("Usage in a separate chunk at the end.")
    continuous_usage_stats: bool | None = optional("Usage so far in every chunk.")
    include_obfuscation: only(False) = None  # type: ignore[valid-type]


class OffFields(Fields):
    """What other servers have and Soloist has not: only the values that switch it off."""

    # how tokens are chosen
    length_penalty: only(1) = None  # type: ignore[valid-type]
    early_stopping: only(False) = None  # type: ignore[valid-type]
    use_beam_search: only(False) = None  # type: ignore[valid-type]
    num_beams: only(1) = None  # type: ignore[valid-type]
    typical_p: only(1) = None  # type: ignore[valid-type]
    tfs_z: only(1) = None  # type: ignore[valid-type]
    top_a: only(0) = None  # type: ignore[valid-type]
    repeat_penalty: only(1) = None  # type: ignore[valid-type]
    no_repeat_ngram_size: only(0) = None  # type: ignore[valid-type]
    mirostat: only(0) = None  # type: ignore[valid-type]
    dynatemp_range: only(0) = None  # type: ignore[valid-type]
    xtc_probability: only(0) = None  # type: ignore[valid-type]
    dry_multiplier: only(0) = None  # type: ignore[valid-type]
    bad_words: only([]) = None  # type: ignore[valid-type]
    allowed_token_ids: only() = None  # type: ignore[valid-type]
    logits_processors: only([]) = None  # type: ignore[valid-type]

    # what the text and the reply hold
    skip_special_tokens: only(True) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: only(True) = None  # type: ignore[valid-type]
    include_stop_str_in_output: only(False) = None  # type: ignore[valid-type]
    no_stop_trim: only(False) = None  # type: ignore[valid-type]
    detokenize: only(True) = None  # type: ignore[valid-type]
    prompt_logprobs: only() = None  # type: ignore[valid-type]
    return_tokens_as_token_ids: only(False) = None  # type: ignore[valid-type]
    return_hidden_states: only(False) = None  # type: ignore[valid-type]

    # how a request is run
    priority: only(0) = None  # type: ignore[valid-type]
    truncate_prompt_tokens: only() = None  # type: ignore[valid-type]
    guided_decoding_backend: only() = None  # type: ignore[valid-type]
    guided_whitespace_pattern: only() = None  # type: ignore[valid-type]
    lora_path: only() = None  # type: ignore[valid-type]
    kv_transfer_params: only() = None  # type: ignore[valid-type]
    cache_salt: only() = None  # type: ignore[valid-type]


class SamplingFields(OffFields):
    """How tokens are chosen and when generation ends: what `SamplingParams` knows."""

    temperature: Number | None = bounded("0 is greedy; default 1.", minimum=0, maximum=100)
    top_p: Number | None = bounded(
        "Above 0, at most 1, the default.", exclusiveMinimum=0, maximum=1
    )
    top_k: int | None = bounded("0 or -1 keeps all tokens.", minimum=-1)
    min_p: Number | None = bounded("0 … 1; default 0.", minimum=0, maximum=1)
    repetition_penalty: Number | None = bounded(
        "Above 0, at most 100; default 1.", exclusiveMinimum=0, maximum=100
    )
    presence_penalty: Number | None = bounded("-2 … 2; default 0.", minimum=-2, maximum=2)
    frequency_penalty: Number | None = bounded("-2 … 2; default 0.", minimum=-2, maximum=2)
    seed: int | None = bounded(
        "The same seed gives the same text. Choice i uses seed + i.", minimum=0
    )
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stop_token_ids: Items[int] | None = Field(default=None, max_length=256)
    logit_bias: dict[str, Number] | None = optional("Token id to bias, -100 … 100.")
    min_tokens: int | None = bounded("End tokens are excluded before this many tokens.", minimum=0)
    ignore_eos: bool | None = optional("Do not stop at the model's end-of-sequence token.")

    def params(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters.

        Raises:
            BadSampling: a value out of range.
            Problem: a key of logit_bias that is no token id.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params = SamplingParams(
            temperature=1.0 if not self.temperature else self.temperature,
            top_k=None if self.top_k in (None, 0, -1) else self.top_k,
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            logit_bias=_parsed_bias(self.logit_bias or {}),
            min_tokens=_or(self.min_tokens, 0),
            max_tokens=max_tokens,
            ignore_eos=bool(self.ignore_eos),
        )
        if self.temperature == 0:
            # Clients send these beside 0, where no value of theirs changes the best token.
            return replace(params, temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, seed=None)
        return params


class NamedSchema(Fields):
    """A JSON schema as OpenAI's clients send it."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = optional("Answers always keep to the schema.")


class ResponseFormat(Fields):
    """`response_format` of chats and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class TextFormat(Fields):
    """`text.format` of responses."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFields(Fields):
    """`text` of responses."""

    format: TextFormat | None = None
    verbosity: only("medium") = None  # type: ignore[valid-type]  # OpenAI's default


class OutputFormat(Fields):
    """`output_config.format` of messages."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputFields(Fields):
    """`output_config` of messages."""

    format: OutputFormat | None = None
    effort: only("high") = None  # type: ignore[valid-type]  # Anthropic's default, which is sent


class StructuredOutputs(Fields):
    """`structured_outputs`, as vLLM has it."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None


class ShapeFields(Fields):
    """The format of an answer; at most one of these fields per request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = optional(
        "One of json, json_object, regex, choice, grammar (Lark)."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = None


class GenerationFields(SamplingFields, ShapeFields):
    """What both ways to generate with OpenAI's clients share."""

    model: str | None = None
    n: int | None = optional("Answers; default 1.", ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = optional("Also return token ids of prompt and answers.")
    best_of: int | None = optional("Only the value of n: every answer is returned.", ge=1)
    user: Harmless = None
    metadata: Harmless = None
    store: Harmless = None
    service_tier: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    cache_prompt: Harmless = None

    def check_together(self) -> None:
        """Refuse options of a stream where there is none, and answers that are not returned."""
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", f"{self.n or 1}, which is n")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only with stream: true")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(
        description="Text, texts, token ids, or lists of them."
    )
    suffix: str | None = optional("Text after the gap, for models trained to fill in the middle.")
    max_tokens: int | None = bounded(
        "Default 16. 0 with echo and logprobs: only score the prompt.", minimum=0
    )
    echo: bool | None = optional(
        "Begin the text with the prompt; with logprobs, its tokens are scored too."
    )
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt's tokens are wanted."""
        return bool(self.echo) and self.logprobs is not None


class ChatFields(Fields):
    """What makes a prompt of a conversation."""

    messages: Items[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Variables for the chat template, such as enable_thinking."
    )
    tools: Items[dict[str, Any]] | None = optional(
        "Functions, for models whose tool calls Soloist can read."
    )


class PredictedPart(Fields):
    """A piece of a predicted text."""

    type: Literal["text"]
    text: str


class PredictionFields(Fields):
    """`prediction` of chats: text that the answer will mostly repeat."""

    type: Literal["content"]
    content: str | Items[PredictedPart]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationFields, ChatFields):
    """POST /v1/chat/completions."""

    messages: Items[dict[str, Any]] = Field(
        description="Roles system (or developer), user, assistant, tool; content is text."
    )
    max_completion_tokens: int | None = bounded(
        "Default: default_max_tokens of /v1/models, or what fits.", minimum=1
    )
    max_tokens: int | None = bounded("Older name of max_completion_tokens.", minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    samplers: Items[str] | None = optional(
        "Of llama.cpp's, those that are used: all whose fields are given. The order is Soloist's."
    )
    id_slot: Harmless = None
    tool_choice: str | dict[str, Any] | None = optional(
        "auto, none, required, or the name of a function."
    )
    parallel_tool_calls: bool | None = None
    include_reasoning: only(True) = None  # type: ignore[valid-type]
    separate_reasoning: only(True) = None  # type: ignore[valid-type]
    stream_reasoning: only(True) = None  # type: ignore[valid-type]
    echo: only(False) = None  # type: ignore[valid-type]
    add_special_tokens: only(False) = None  # type: ignore[valid-type]
    documents: only([]) = None  # type: ignore[valid-type]
    chat_template: only() = None  # type: ignore[valid-type]
    mm_processor_kwargs: only({}) = None  # type: ignore[valid-type]
    functions: only([]) = None  # type: ignore[valid-type]
    function_call: only("none", "auto") = None  # type: ignore[valid-type]
    modalities: only(["text"]) = None  # type: ignore[valid-type]
    audio: only() = None  # type: ignore[valid-type]
    prediction: PredictionFields | None = optional(
        "Text that the answer will mostly repeat, such as a file that it edits: the same answer, "
        "sooner. Not with n above 1."
    )
    reasoning_effort: Effort | None = optional(EFFORT_TOLD)
    verbosity: only("medium") = None  # type: ignore[valid-type]  # OpenAI's default
    web_search_options: only() = None  # type: ignore[valid-type]


class TokenizeRequest(ChatFields):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = optional("Default true for a prompt, false for messages.")
    content: str | None = optional("A text, as llama.cpp's clients send it.")
    add_special: bool | None = optional("Beside content; default false.")
    parse_special: only(True) = None  # type: ignore[valid-type]
    with_pieces: bool | None = optional("Beside content: tokens with their texts.")


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]
    skip_special_tokens: bool | None = optional("Default false.")


def _or(value: Any, default: Any) -> Any:  # noqa: ANN401 - numbers of two kinds
    return default if value is None else value


def _parsed_bias(given: dict[str, Number]) -> dict[int, float]:
    if not all(_TOKEN_ID.fullmatch(key) for key in given):
        raise invalid("logit_bias", "keys are token ids, such as {'1234': -100}")
    return {int(key): value for key, value in given.items()}
