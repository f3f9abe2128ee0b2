"""What a request asks its answers to look like, from fields to grammars.

Formats come from `response_format` and its relatives, calls from `tool_choice` and strict tools.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from soloist.errors import BadGrammar
from soloist.server.fields import (
    OutputFormat,
    ResponseFormat,
    ShapeFields,
    StructuredOutputs,
    TextFormat,
)
from soloist.server.part_formats import special_marks
from soloist.server.problems import Problem, invalid, unsupported
from soloist.text.answers import (
    Form,
    Reasoning,
    answer_grammar,
    choice_form,
    json_form,
    lark_form,
    object_form,
    regex_form,
)
from soloist.text.call_grammar import Calls, Function
from soloist.text.listed_calls import ARGUMENTS
from soloist.text.parts import PartFormat
from soloist.text.processor import Processor

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of an answer, and the field that asks for it."""

    field: str
    form: Form


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether an answer may or must be calls; of one function, if `name` is given."""

    kind: Literal["auto", "none", "required"]
    name: str | None = None


def openai_choice(given: str | Mapping[str, Any] | None) -> ToolChoice:
    """`tool_choice` of chats and of responses, which name a function in two ways.

    Raises:
        Problem: it is neither a known word nor a function.
    """
    match given:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}} if len(given) == 2:
            return ToolChoice("required", name)
        case {"type": "function", "name": str(name)} if len(given) == 2:
            return ToolChoice("required", name)
    raise unsupported("tool_choice", "'auto', 'none', 'required', a function by its name")


def anthropic_choice(given: Mapping[str, Any] | None) -> tuple[ToolChoice, bool]:
    """`tool_choice` of messages, and whether an answer may hold several calls.

    Raises:
        Problem: it is of an unknown type, or has an unknown field.
    """
    fields = dict(given or {"type": "auto"})
    is_single = fields.pop("disable_parallel_tool_use", None)
    if is_single not in (None, True, False):
        raise invalid("tool_choice.disable_parallel_tool_use", "expected true or false")
    match fields:
        case {"type": "auto" | "none" as kind} if len(fields) == 1:
            return ToolChoice(kind), not is_single
        case {"type": "any"} if len(fields) == 1:
            return ToolChoice("required"), not is_single
        case {"type": "tool", "name": str(name)} if len(fields) == 2:
            return ToolChoice("required", name), not is_single
    raise unsupported("tool_choice", "type 'auto', 'none', 'any', or 'tool' with a name")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tools may be used.

    Attributes:
        tools: that the model is told of, as OpenAI describes them.
        numbers: of each of them in the request.
        strict: those of these numbers whose schemas calls must keep to.
        choice: whether the answer has to be calls.
        several: whether an answer may have more than one call.
        schema_field: of tool number {}, where its schema stands in the request.
        parallel_field: that says whether there may be several.
    """

    tools: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    strict: frozenset[int]
    choice: ToolChoice
    several: bool
    schema_field: str
    parallel_field: str = "parallel_tool_calls"

    def __post_init__(self) -> None:
        name, names = self.choice.name, [tool["function"]["name"] for tool in self.tools]
        if self.is_forced and not self.tools:
            raise invalid("tool_choice", "a call is required, but tools has none to call")
        if name is not None and name not in names:
            raise invalid("tool_choice", f"no tool {name!r} (available: {', '.join(names)})")

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be calls."""
        return self.choice.kind == "required"

    @property
    def field(self) -> str:
        """The one that asks for a grammar, if any does."""
        if self.is_forced:
            return "tool_choice"
        if self.strict and self.tools:
            return self.schema_field.format(min(self.strict)).rpartition(".")[0] + ".strict"
        return self.parallel_field if self.tools and not self.several else ""


def shape_of(asked: ShapeFields) -> Shape | None:
    """What a chat or completion asks for.

    Raises:
        Problem: several things, or one that is incomplete.
    """
    found = [
        *_of_response_format(asked.response_format),
        *_of_structured_outputs(asked.structured_outputs),
        *_of_json("guided_json", asked.guided_json),
        *_of_text("guided_regex", asked.guided_regex, regex_form),
        *_of_text("guided_grammar", asked.guided_grammar, lark_form),
        *_of_choices("guided_choice", asked.guided_choice),
    ]
    if len(found) > 1:
        raise invalid(
            found[1].field, f"cannot be combined with {found[0].field}; an answer has one format"
        )
    return found[0] if found else None


def text_shape(given: TextFormat | None) -> Shape | None:
    """What `text.format` asks for."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Shape("text.format", object_form())
    if given.json_schema is None:
        raise invalid("text.format.schema", "expected a JSON schema")
    return Shape("text.format.schema", json_form(given.json_schema))


def output_shape(given: OutputFormat | None) -> Shape | None:
    """What `output_config.format` asks for."""
    if given is None:
        return None
    return Shape("output_config.format.schema", json_form(given.json_schema))


def grammar_of(
    processor: Processor,
    shape: Shape | None,
    use: ToolUse | None,
    style: PartFormat,
    prompt_end: str,
) -> str | None:
    """What answers must look like, as a grammar that compiles; None where anything goes.

    Args:
        processor: of the model.
        shape: of an answer that is no call.
        use: of tools.
        style: how this model's answers are taken apart.
        prompt_end: tells whether the answer begins within reasoning.

    Raises:
        Problem: no grammar can be made of a field, or this model's calls have none.
    """
    calls = None
    if use is not None and use.tools and (use.field or shape is not None):
        calls = _calls(processor, use, style, shape)
    if calls is not None and calls.is_forced:
        shape = None
    if shape is None and calls is None:
        return None
    end, special = prompt_end.rstrip(), special_marks(processor, style)
    reasoning: Reasoning = "none"
    if style.thinks and not end.endswith(style.end_think):
        reasoning = "begun" if end.endswith(style.think) else "perhaps"
    form = None if shape is None else shape.form
    try:
        marks = style.think, style.end_think
        source = answer_grammar(form, calls, reasoning, special, marks)
        processor.grammars.check(source)
    except BadGrammar as error:
        raise _blamed(processor, shape, calls, use, error) from error
    return source


def plain_grammar(processor: Processor, shape: Shape | None) -> str | None:
    """The same for texts that are continued.

    Raises:
        Problem: no grammar can be made of the field.
    """
    return grammar_of(processor, shape, None, PartFormat(None, thinks=False), "")


def _calls(processor: Processor, use: ToolUse, style: PartFormat, shape: Shape | None) -> Calls:
    field = use.field or (shape.field if shape is not None else "")
    if style.calls is None:
        raise unsupported(field, "leave it out; Soloist has no grammar for this model's tool calls")
    if shape is not None and style.calls in ("bare", "python") and not use.is_forced:
        kind = "JSON" if style.calls == "bare" else "a list"
        raise unsupported(
            f"{shape.field} beside tools",
            f"one of the two; this model writes calls as plain {kind}, as its answer would be",
        )
    functions = [
        Function(tool["function"]["name"], tool["function"].get("parameters") or _NO_ARGUMENTS)
        for tool in use.tools
        if use.choice.name in (None, tool["function"]["name"])
    ]
    several = use.several and use.choice.name is None
    names_arguments = ARGUMENTS in processor.chat_template.source
    return Calls(style.calls, tuple(functions), use.is_forced, several, names_arguments)


def _blamed(
    processor: Processor,
    shape: Shape | None,
    calls: Calls | None,
    use: ToolUse | None,
    error: BadGrammar,
) -> Problem:
    """The field of which no grammar can be made."""
    if shape is not None and (told := _trouble(processor, shape.form, None)) is not None:
        return invalid(shape.field, told)
    if calls is None or use is None:
        return invalid(shape.field if shape is not None else "", error.message)
    names = [tool["function"]["name"] for tool in use.tools]
    for function in calls.functions:
        one = replace(calls, functions=(function,), is_forced=True, several=False)
        if (told := _trouble(processor, None, one)) is not None:
            return invalid(use.schema_field.format(use.numbers[names.index(function.name)]), told)
    return invalid("tools", error.message)


def _trouble(processor: Processor, form: Form | None, calls: Calls | None) -> str | None:
    try:
        processor.grammars.check(answer_grammar(form, calls))
    except BadGrammar as error:
        return error.message
    return None


def _of_response_format(given: ResponseFormat | None) -> list[Shape]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Shape("response_format", object_form())]
    if given.json_schema is None:
        raise invalid("response_format.json_schema", 'expected {"name": …, "schema": {…}}')
    schema = given.json_schema.json_schema
    return [Shape("response_format.json_schema.schema", json_form(schema))]


def _of_structured_outputs(given: StructuredOutputs | None) -> list[Shape]:
    if given is None:
        return []
    place = "structured_outputs"
    found = [
        *_of_json(f"{place}.json", given.json_),
        *([Shape(f"{place}.json_object", object_form())] if given.json_object else []),
        *_of_text(f"{place}.regex", given.regex, regex_form),
        *_of_choices(f"{place}.choice", given.choice),
        *_of_text(f"{place}.grammar", given.grammar, lark_form),
    ]
    if not found:
        raise invalid(place, "expected json, json_object, regex, choice or grammar")
    return found


def _of_json(field: str, given: dict[str, Any] | str | None) -> list[Shape]:
    if given is None:
        return []
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise invalid(field, f"the text is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid(field, "expected a JSON schema, which is an object")
    return [Shape(field, json_form(given))]


def _of_text(field: str, given: str | None, make: Callable[[str], Form]) -> list[Shape]:
    return [] if given is None else [Shape(field, make(given))]


def _of_choices(field: str, given: list[str] | None) -> list[Shape]:
    return [] if given is None else [Shape(field, choice_form(given))]
