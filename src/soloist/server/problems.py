"""Every reply that is not a success: one class, and what errors of the engine become."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from soloist.errors import (
    BadLogits,
    BadSampling,
    BadTokenId,
    EmptyPrompt,
    PredictionTooLong,
    PromptTooLong,
    QueueFull,
    SoloistError,
    StepFailed,
    Unavailable,
    UserError,
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


# Characters of a bad value that an error repeats, and of a whole message.
_MOST_SHOWN, _MOST_TOLD = 40, 2000


class Problem(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what was given, what is allowed, what to do.
        param: the field that is to blame.
        code: a word for programs.
        headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Names of fields may be as long as a body.
        message = _shortened(message, _MOST_TOLD)
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else _shortened(param, _MOST_TOLD)
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """As plain values, for another process."""
        made = partial(Problem, param=self.param, code=self.code, headers=self.headers)
        return made, (self.status, self.message)

    @property
    def kind(self) -> str:
        """The class of error, as both OpenAI's and Anthropic's clients know it."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    @property
    def word(self) -> str:
        """What went wrong, for programs."""
        return self.code or self.kind

    def anthropic_body(self) -> dict[str, object]:
        """As Anthropic's clients read it."""
        kind = "api_error" if self.status >= 500 else self.kind
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def ollama_body(self) -> dict[str, object]:
        """As Ollama's clients read it."""
        return {"error": self.message}

    def body(self) -> dict[str, object]:
        """As OpenAI's clients read it."""
        error = {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }  # fmt: skip
        return {"error": error}


def problem_of(error: SoloistError | Problem) -> Problem:
    """The reply to a client whose request was refused or failed, by the engine or before it."""
    message = str(error).replace("\n\n", "; ")
    match error:
        case Problem():
            return error
        case QueueFull():
            wait = {"Retry-After": str(math.ceil(error.retry_s))}
            return Problem(429, message, code="queue_full", headers=wait)
        case Unavailable():
            return Problem(503, message, code="unavailable")
        case PromptTooLong() | EmptyPrompt() | PredictionTooLong():
            return _of_prompt(error, message)
        case BadLogits() | StepFailed():
            code = "bad_logits" if isinstance(error, BadLogits) else "step_failed"
            return Problem(500, message, code=code)
        case BadSampling() | BadTokenId():
            return Problem(400, message, param=error.field.split("[")[0], code="invalid_value")
        case UserError():
            return Problem(400, message, code="invalid_value")
    return Problem(500, message, code="device_error")


def _of_prompt(error: PromptTooLong | EmptyPrompt | PredictionTooLong, message: str) -> Problem:
    if isinstance(error, PredictionTooLong):
        return Problem(400, message, param="prediction", code="context_length_exceeded")
    if isinstance(error, EmptyPrompt):
        return Problem(400, message, param="prompt", code="invalid_value")
    # Clients look for these words, and for a number without commas.
    told = f"This model's maximum context length is {error.context_tokens} tokens: {message}"
    return Problem(400, told, param="prompt", code="context_length_exceeded")


def too_long_for_anthropic(error: PromptTooLong) -> Problem:
    """The same as `problem_of` gives, in the words that Anthropic's clients look for.

    Claude Code compacts its conversation at the first sentence. From the second one it takes the
    numbers, and asks for fewer new tokens.
    """
    num_prompt, num_new, most = error.prompt_tokens, error.new_tokens, error.context_tokens
    if num_prompt < most:
        told = (
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_new} > {most}"
            ", decrease input length or `max_tokens` and try again"
        )
    else:
        told = f"prompt is too long: {num_prompt} tokens > {most} maximum; {error.hint}"
    return Problem(400, told, param="prompt", code="context_length_exceeded")


def unsupported(path: str, allowed: str = "") -> Problem:
    """A field that would have to be ignored."""
    wanted = f" (allowed: {allowed})" if allowed else ""
    return Problem(
        400,
        f"{path} is not supported{wanted}; nothing was generated, since ignoring it would change "
        "what you get",
        param=path,
        code="unsupported_field",
    )


def invalid(path: str, message: str) -> Problem:
    """A field with an unusable value."""
    return Problem(400, f"{path}: {message}", param=path, code="invalid_value")


def problem_of_fields(error: ValidationError) -> Problem:
    """The first field that does not fit its schema; one that is unknown goes before others.

    What is missing may stand there under another name.
    """
    found = error.errors(include_url=False)
    first = next((x for x in found if x["type"] == "extra_forbidden"), found[0])
    path = path_of(first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        return unsupported(path)
    if first["type"] == "not_supported":
        return unsupported(path, first.get("ctx", {}).get("allowed", ""))
    # A field of several types has an error for each.
    told = [x["msg"] for x in found if path_of(x["loc"]) == path]
    given = "" if first["type"] == "missing" else f" (given: {_shown(first['input'])})"
    return invalid(path, ", or: ".join(dict.fromkeys(told)) + given)


def _shown(value: object) -> str:
    """A value of a request, in a few words."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = "null" if value is None else json.dumps(value, ensure_ascii=False)
    return _shortened(text, _MOST_SHOWN)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


# What pydantic adds to a place where a field may have several types.
_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "dict"})


def path_of(places: Sequence[str | int]) -> str:
    """('messages', 0, 'content', 'str') → 'messages[0].content'."""
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif place.isidentifier() and place not in _TYPE_NAMES:
            path += f".{place}" if path else place
    return path
