"""Whether the model reasons before it answers: what requests ask for, as a template's variables."""

from collections.abc import Mapping
from typing import Any

from soloist.server.problems import invalid, unsupported
from soloist.text.parts import format_of
from soloist.text.processor import Processor

# Variables of chat templates: true or false, and a word.
_SWITCHES, _LEVEL = ("enable_thinking", "thinking"), "reasoning_effort"
# Words that switch reasoning off where a template knows on and off alone.
_OFF = ("none", "minimal")


def reasoning_variables(
    processor: Processor, field: str, effort: str | None, given: Mapping[str, object] = {}
) -> dict[str, Any]:
    """Variables for the model's template, `given` included.

    Args:
        processor: of the model.
        field: that asks for the effort.
        effort: a word from `none` to `max`; None leaves the template's default.
        given: other variables that the request has.

    Raises:
        Problem: this model cannot do so, or `given` says something else.
    """
    found: dict[str, Any] = {}
    if effort is None:
        return dict(given)
    is_on, known = effort not in _OFF, processor.chat_template.variables
    if _LEVEL in known:
        found[_LEVEL] = effort
    found |= {name: is_on for name in _SWITCHES if name in known}
    if not found and is_on != (thinks := format_of(processor.chat_template.source).thinks):
        told = "always reasons" if thinks else "does not reason"
        raise unsupported(field, f"leave it out; this model {told}")
    for name, value in found.items():
        if given.get(name, value) != value:
            raise invalid(field, f"contradicts chat_template_kwargs.{name}")
    return {**given, **found}


def is_switchable(processor: Processor) -> bool:
    """Whether the model's template has a variable for reasoning."""
    return not processor.chat_template.variables.isdisjoint((*_SWITCHES, _LEVEL))


def effort_warnings(processor: Processor, field: str, effort: str | None) -> tuple[str, ...]:
    """What a reply says about an effort that is no more than on or off to this model."""
    if effort in (None, "none") or _LEVEL in processor.chat_template.variables:
        return ()
    state = "off" if effort in _OFF else "on"
    return (f"{field} '{effort}': this model knows on and off alone; its reasoning is {state}",)
