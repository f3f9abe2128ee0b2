"""How OpenAI's responses become prompts."""

from typing import Any

from pydantic import Field

from soloist.server.fields import (
    MOST_TOP_LOGPROBS,
    Harmless,
    Items,
    SamplingFields,
    TextFields,
    only,
    optional,
)
from soloist.server.items import plain_conversation, plain_tools
from soloist.server.part_formats import PROMPT_END, part_format, shown_ids
from soloist.server.preparation.prepared import Prepared, PreparedPrompt
from soloist.server.problems import invalid
from soloist.server.prompts import fitted, for_template
from soloist.server.shapes import ToolUse, grammar_of, openai_choice, text_shape
from soloist.text.processor import Processor

SEALED = "reasoning.encrypted_content"
_LIKELY = "message.output_text.logprobs"


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Items[dict[str, Any]] = Field(description="Text, or a list of messages.")
    instructions: str | None = optional("System message before the input.")
    max_output_tokens: int | None = optional(
        "Default: default_max_tokens of /v1/models, or what fits."
    )
    stream: bool | None = None
    store: Harmless = None
    user: Harmless = None
    client_metadata: Harmless = None
    metadata: dict[str, str] | None = optional("Returned unchanged.")
    service_tier: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_retention: Harmless = None
    parallel_tool_calls: bool | None = None
    truncation: only("disabled") = None  # type: ignore[valid-type]
    text: TextFields | None = None
    tools: Items[dict[str, Any]] | None = optional("Functions, for models whose calls can be read.")
    tool_choice: str | dict[str, Any] | None = optional(
        "auto, none, required, or the name of a function."
    )
    include: only(  # type: ignore[valid-type]
        [], [SEALED], [_LIKELY], [SEALED, _LIKELY], [_LIKELY, SEALED]
    ) = None
    background: only(False) = None  # type: ignore[valid-type]
    stream_options: only({}, {"include_obfuscation": False}) = None  # type: ignore[valid-type]
    reasoning: only({}, {"summary": "auto"}) = None  # type: ignore[valid-type]
    previous_response_id: only() = None  # type: ignore[valid-type]
    conversation: only() = None  # type: ignore[valid-type]
    prompt: only() = None  # type: ignore[valid-type]
    top_logprobs: int | None = optional(f"With include: {_LIKELY}.", ge=0, le=MOST_TOP_LOGPROBS)

    @property
    def shown_logprobs(self) -> int | None:
        """Alternatives to name beside each token; None for no log probabilities."""
        if _LIKELY in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid("top_logprobs", f"only with include: ['{_LIKELY}']")
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


def prepare_response(
    processor: Processor, asked: ResponsesRequest, model: str
) -> Prepared[ResponsesRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    shape = text_shape(asked.text.format if asked.text else None)
    use = _tool_use(asked)
    wanted, tools = asked.max_output_tokens, use.tools
    params = asked.params(processor.context_tokens if wanted is None else wanted)
    params.check_vocabulary(processor.vocab_size)
    style, shown = part_format(processor, tools), asked.shown_logprobs
    if shown is not None and (style.thinks or style.calls is not None):
        told = "not supported with reasoning or tools; use /v1/chat/completions"
        raise invalid("include", f"'{_LIKELY}' is {told}")
    chat = plain_conversation(asked.input, asked.instructions)
    text = processor.chat_template.render(
        for_template(processor, chat), tools=tools or None, add_generation_prompt=True
    )
    prompt_ids = processor.encode(text, add_special_tokens=False)
    params = fitted(processor, prompt_ids, params, wanted)
    end = text[-PROMPT_END:]
    grammar = grammar_of(processor, shape, use, style, end)
    one = PreparedPrompt(tuple(prompt_ids), params, shown, shown_ids(processor, style))
    # The reply repeats instructions and tools.
    without = {"input": "", "logit_bias": None, "stop": None}
    return Prepared(asked.model_copy(update=without), model, (one,), grammar, style, end)


def _tool_use(asked: ResponsesRequest) -> ToolUse:
    tools, choice = plain_tools(asked.offered_tools), openai_choice(asked.tool_choice)
    strict = frozenset(n for n, tool in enumerate(asked.offered_tools) if tool.get("strict"))
    several = asked.parallel_tool_calls is not False
    return ToolUse(tools, strict, choice, several, "tools[{}].parameters")
