"""From messages and texts to checked token ids."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from soloist.sampling.params import SamplingParams
from soloist.server.fields import MOST_CHOICES, ChatFields, CompletionRequest
from soloist.server.problems import invalid, unsupported
from soloist.text import Tool
from soloist.text.parts import CALLS
from soloist.text.processor import Processor

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")

# Of a chat, what every template either reads or may leave out without loss.
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "id", "annotations"}
    | {"reasoning", "reasoning_content", "thinking", "cache_control"}
)


def chat_prompt(
    processor: Processor,
    asked: ChatFields,
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any],
) -> str:
    """A conversation through the model's template.

    Args:
        processor: of the model.
        asked: the conversation.
        tools: that the model is told of.
        variables: of the template, beside those of the conversation.

    Raises:
        UserError: the template is absent or refuses the conversation.
        Problem: content that is no text.
    """
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in variables:
            raise invalid(f"chat_template_kwargs.{name}", "set this field in the request itself")
    return processor.chat_template.render(
        for_template(
            processor, plain_messages(asked.messages or (), processor.chat_template.source)
        ),
        tools=tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=bool(asked.continue_final_message),
        variables=variables,
    )


def for_template(
    processor: Processor, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages with earlier calls as the model's template wants them."""
    chat = with_objects(messages)
    return with_short_ids(chat) if CALLS in processor.chat_template.source else chat


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, ids of calls as Mistral's templates demand them: nine letters or digits.

    Calls and results keep belonging together: one id always becomes the same other one.
    """
    chat = []
    for message in messages:
        short = dict(message)
        if isinstance(call_id := message.get("tool_call_id"), str):
            short["tool_call_id"] = _short(call_id)
        if isinstance(calls := message.get("tool_calls"), list):
            short["tool_calls"] = [
                {**call, "id": _short(call["id"])}
                if isinstance(call, dict) and isinstance(call.get("id"), str)
                else call
                for call in calls
            ]
        chat.append(short)
    return chat


def _short(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def plain_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages as templates read them.

    Parts of text become one text, a line each; the role `developer` becomes `system`, which is
    what OpenAI's newer models call it.

    Args:
        messages: as OpenAI's clients send them.
        template: the model's; it may know more roles and fields than all do.

    Raises:
        Problem: a part that is no text, a role or a field that the template would pass over.
    """
    plain = []
    for index, message in enumerate(messages):
        place, role = f"messages[{index}]", message.get("role")
        if role == "developer":
            role = "system"
        if isinstance(role, str) and role not in _ROLES and role not in template:
            raise unsupported(f"{place}.role", ", ".join(map(repr, _ROLES)))
        for name, value in message.items():
            if value and name not in _MESSAGE_FIELDS and name not in template:
                raise unsupported(f"{place}.{name}")
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(texts_of(content, f"{place}.content"))
        plain.append({**message, "role": role, "content": content})
    return plain


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, the arguments of earlier calls as the objects that templates expect.

    OpenAI's clients send them as JSON text; templates would write that as a text within JSON.
    """
    return [
        {**message, "tool_calls": [_with_object(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _with_object(call: Any) -> Any:  # noqa: ANN401 - the template layer says what is no call
    match call:
        case {"function": {"arguments": str(text), **function}}:
            try:
                given = orjson.loads(text)
            except orjson.JSONDecodeError:
                return call
            return {**call, "function": {**function, "arguments": given}}
    return call


def texts_of(parts: Sequence[object], place: str) -> list[str]:
    """The text of each part.

    Raises:
        Problem: a part that is no text.
    """
    return [text_of(part, f"{place}[{n}]") for n, part in enumerate(parts)]


def text_of(part: object, place: str) -> str:
    """The text of one part.

    Raises:
        Problem: it is no text.
    """
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise unsupported(f"{place}.type", "'text'")
    raise invalid(place, 'expected {"type": "text", "text": …}')


def fitted(
    processor: Processor, prompt_ids: Sequence[int], params: SamplingParams, wanted: int | None
) -> SamplingParams:
    """The same; where no number was asked for, with the model's default or what the context holds.

    Args:
        processor: whose context it is.
        prompt_ids: the prompt.
        params: for `wanted` tokens, if that is a number.
        wanted: most new tokens.

    Raises:
        RequestError: the prompt is empty or too long.
    """
    processor.check_prompt(prompt_ids, 1 if wanted is None else wanted)
    if wanted is not None:
        return params
    room = processor.context_tokens - len(prompt_ids)
    return replace(params, max_tokens=min(room, processor.default_tokens or room))


def completion_prompts(processor: Processor, asked: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        UserError: a text that cannot fit, a suffix for a model that cannot fill in.
        Problem: more prompts than answers are allowed, token ids beside a suffix.
    """
    given = asked.prompt
    if isinstance(given, str):
        given = [given]
    elif given and isinstance(given[0], int):
        given = [given]  # one list of token ids
    if len(given) > MOST_CHOICES:
        raise invalid("prompt", f"{len(given):,} prompts (allowed: at most {MOST_CHOICES})")
    if not given:
        raise invalid("prompt", "is an empty list; give at least one prompt")
    return [_completion_ids(processor, prompt, asked.suffix) for prompt in given]  # type: ignore[arg-type]


def _completion_ids(processor: Processor, prompt: str | list[int], suffix: str | None) -> list[int]:
    if suffix is None:
        return prompt if isinstance(prompt, list) else processor.encode(prompt)
    if isinstance(prompt, list):
        raise invalid("suffix", "only with a prompt of text")
    return processor.fim_prompt(prompt, suffix)
