"""How OpenAI's responses become prompts."""

from typing import Any

from pydantic import Field

from soloist.server.fields import (
    EFFORT_TOLD,
    MOST_TOP_LOGPROBS,
    Effort,
    Fields,
    Harmless,
    Items,
    SamplingFields,
    TextFields,
    bounded,
    only,
    optional,
)
from soloist.server.hosted import Tools, without_hosted
from soloist.server.items import plain_conversation, plain_tools
from soloist.server.part_formats import PROMPT_END, part_format, shown_ids
from soloist.server.preparation.prepared import Prepared, PreparedPrompt
from soloist.server.problems import invalid
from soloist.server.prompts import fitted, for_template
from soloist.server.reasoning import effort_warnings, reasoning_variables
from soloist.server.shapes import ToolUse, grammar_of, openai_choice, text_shape
from soloist.text.processor import Processor

SEALED = "reasoning.encrypted_content"
_LIKELY = "message.output_text.logprobs"


class ReasoningFields(Fields):
    """`reasoning`: comes whole, as items of its own."""

    effort: Effort | None = optional(EFFORT_TOLD)
    summary: only("auto") = None  # type: ignore[valid-type]
    generate_summary: only("auto") = None  # type: ignore[valid-type]


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Items[dict[str, Any]] = Field(description="Text, or a list of messages.")
    instructions: str | None = optional("System message before the input.")
    max_output_tokens: int | None = bounded(
        "Default: default_max_tokens of /v1/models, or what fits.", minimum=1
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
    # A prompt that is too long is refused in both cases: there is nothing to cut.
    truncation: only("disabled", "auto") = None  # type: ignore[valid-type]
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
    reasoning: ReasoningFields | None = None
    max_tool_calls: Harmless = None  # of tools that OpenAI runs
    context_management: only([]) = None  # type: ignore[valid-type]
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


def prepare_response(
    processor: Processor, asked: ResponsesRequest, model: str
) -> Prepared[ResponsesRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    shape = text_shape(asked.text.format if asked.text else None)
    offered, warnings = without_hosted(asked.tools or ())
    use = _tool_use(asked, offered)
    wanted, tools = asked.max_output_tokens, use.tools
    params = asked.params(processor.context_tokens if wanted is None else wanted)
    params.check_vocabulary(processor.vocab_size)
    style, shown = part_format(processor, tools), asked.shown_logprobs
    if shown is not None and (style.thinks or style.calls is not None):
        use_chats = "not supported with reasoning or tools; use /v1/chat/completions"
        raise invalid("include", f"'{_LIKELY}' is {use_chats}")
    chat = plain_conversation(asked.input, asked.instructions)
    effort = asked.reasoning.effort if asked.reasoning else None
    text = processor.chat_template.render(
        for_template(processor, chat),
        tools=tools or None,
        add_generation_prompt=True,
        variables=reasoning_variables(processor, "reasoning.effort", effort),
    )
    prompt_ids = processor.encode(text, add_special_tokens=False)
    params = fitted(processor, prompt_ids, params, wanted)
    end = text[-PROMPT_END:]
    grammar = grammar_of(processor, shape, use, style, end)
    one = PreparedPrompt(tuple(prompt_ids), params, shown, shown_ids(processor, style))
    # The reply repeats instructions and tools.
    changed = {"input": "", "logit_bias": None, "stop": None, "tools": [*offered.values()]}
    asked = asked.model_copy(update=changed)
    warnings += effort_warnings(processor, "reasoning.effort", effort)
    return Prepared(asked, model, (one,), grammar, style, end, warnings)


def _tool_use(asked: ResponsesRequest, offered: Tools) -> ToolUse:
    choice = openai_choice(asked.tool_choice)
    tools: Tools = {} if choice.kind == "none" else offered
    strict = frozenset(n for n, tool in tools.items() if tool.get("strict"))
    several, place = asked.parallel_tool_calls is not False, "tools[{}].parameters"
    return ToolUse(plain_tools(tools), [*tools], strict, choice, several, place)
