"""How the conversations of Anthropic's clients become prompts."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from soloist.server.conversation import (
    loaded_tools,
    plain_conversation,
    plain_tools,
    system_text,
)
from soloist.server.fields import (
    Fields,
    Harmless,
    Items,
    Number,
    OutputFields,
    SamplingFields,
    bounded,
    only,
    optional,
)
from soloist.server.hosted import Tools, without_hosted
from soloist.server.part_formats import PROMPT_END, part_format, shown_ids
from soloist.server.preparation.prepared import Prepared, PreparedPrompt, with_warnings
from soloist.server.prompts import for_template
from soloist.server.reasoning import is_switchable, reasoning_variables
from soloist.server.shapes import ToolUse, anthropic_choice, grammar_of, output_shape
from soloist.text.processor import Processor

# What Anthropic does where the field is left out, and what is done here: clients send it.
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class ThinkingFields(Fields):
    """`thinking`: whether the model reasons. Adaptive leaves it to the model."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = optional("Has no effect, which a warning says.", ge=1)
    display: Literal["summarized", "omitted"] | None = optional(
        "omitted: blocks of reasoning come without their text."
    )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reply says about a budget."""
        if self.budget_tokens is None:
            return ()
        return ("thinking.budget_tokens has no effect; max_tokens bounds reasoning and text",)


class ConversationFields(Fields):
    """What is asked of the model."""

    model: str | None = None
    messages: Items[dict[str, Any]]
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = optional("For models whose calls can be read.")
    tool_choice: dict[str, Any] | None = optional("Type auto, none, any, or tool with a name.")
    thinking: ThinkingFields | None = None
    context_management: only({"edits": []}, _KEEP_ALL) = None  # type: ignore[valid-type]
    output_config: OutputFields | None = None
    cache_control: Harmless = None
    mcp_servers: only([]) = None  # type: ignore[valid-type]
    container: only() = None  # type: ignore[valid-type]
    speed: only("standard") = None  # type: ignore[valid-type]

    def offered_tools(self) -> tuple[Tools, tuple[str, ...]]:
        """Tools that the model is told of, and warnings about others."""
        if anthropic_choice(self.tool_choice)[0].kind == "none":
            return {}, ()
        return without_hosted(self.tools or ())


class CountRequest(ConversationFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields):
    """POST /v1/messages."""

    max_tokens: int = Field(
        description="Most tokens to generate.", json_schema_extra={"minimum": 1}
    )
    temperature: Number | None = bounded("0 is greedy; default 1.", minimum=0, maximum=100)
    top_p: Number | None = bounded(
        "Above 0, at most 1, the default.", exclusiveMinimum=0, maximum=1
    )
    top_k: int | None = bounded("0 or -1 keeps all tokens.", minimum=-1)
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, max_length=64
    )
    stream: bool | None = None
    metadata: Harmless = None
    service_tier: Harmless = None


def count_tokens(processor: Processor, asked: CountRequest, _: str) -> bytes:
    """The reply that says how long a prompt would be.

    Raises:
        Problem, UserError: there is no such prompt.
    """
    text = _prompt(processor, asked)
    count = len(processor.encode(text, add_special_tokens=False))
    return orjson.dumps(with_warnings({"input_tokens": count}, asked.offered_tools()[1]))


def prepare_message(
    processor: Processor, asked: MessagesRequest, model: str
) -> Prepared[MessagesRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    use = _tool_use(asked)
    shape = output_shape(asked.output_config.format if asked.output_config else None)
    fields = SamplingFields(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
    )
    params = fields.params(asked.max_tokens)
    text = _prompt(processor, asked)
    prompt_ids = processor.encode(text, add_special_tokens=False)
    processor.check_prompt(prompt_ids, asked.max_tokens)
    style, end = part_format(processor, use.tools), text[-PROMPT_END:]
    grammar = grammar_of(processor, shape, use, style, end)
    one = PreparedPrompt(tuple(prompt_ids), params, shown_ids=shown_ids(processor, style))
    without = dict.fromkeys(_MAKES_THE_PROMPT)
    _, warnings = asked.offered_tools()
    warnings += asked.thinking.warnings if asked.thinking else ()
    asked = asked.model_copy(update=without)
    return Prepared(asked, model, (one,), grammar, style, end, warnings)


# Of no use to the reply, and long.
_MAKES_THE_PROMPT = (
    "messages", "system", "tools", "output_config", "stop_sequences", "metadata"
)  # fmt: skip


def _tool_use(asked: MessagesRequest) -> ToolUse:
    choice, several = anthropic_choice(asked.tool_choice)
    _, tools = loaded_tools(asked.offered_tools()[0], asked.messages)
    strict = frozenset(n for n, tool in tools.items() if tool.get("strict"))
    return ToolUse(
        plain_tools(tools), [*tools], strict, choice, several, "tools[{}].input_schema",
        "tool_choice.disable_parallel_tool_use",
    )  # fmt: skip


def _prompt(processor: Processor, asked: ConversationFields) -> str:
    first, _ = loaded_tools(asked.offered_tools()[0], asked.messages)
    known, _ = without_hosted(asked.tools or ())
    system = system_text(asked.system)
    chat = plain_conversation(asked.messages, plain_tools(known))
    if system:
        chat.insert(0, {"role": "system", "content": system})
    return processor.chat_template.render(
        for_template(processor, chat),
        tools=plain_tools(first) or None,
        # A message of the assistant at the end is the beginning of its answer.
        continue_final_message=bool(chat) and chat[-1]["role"] == "assistant",
        variables=reasoning_variables(processor, "thinking", _effort(processor, asked.thinking)),
    )


def _effort(processor: Processor, asked: ThinkingFields | None) -> str | None:
    """What `thinking` is in the words of a template."""
    if asked is None or (asked.type == "adaptive" and not is_switchable(processor)):
        return None
    return "none" if asked.type == "disabled" else "high"
