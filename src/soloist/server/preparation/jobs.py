"""The kinds of requests that are read here, and how: JSON, bounds, checks, prompt."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import orjson
from pydantic import ValidationError

from soloist.errors import PromptTooLong, SoloistError
from soloist.server.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from soloist.server.preparation.bounds import check_body, check_fields
from soloist.server.preparation.chat import prepare_chat
from soloist.server.preparation.completions import prepare_completions
from soloist.server.preparation.llama_cpp import (
    InfillRequest,
    LlamaCppRequest,
    prepare_infill,
    prepare_llama_cpp,
)
from soloist.server.preparation.messages import (
    CountRequest,
    MessagesRequest,
    count_tokens,
    prepare_message,
)
from soloist.server.preparation.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    prepare_ollama_chat,
    prepare_ollama_text,
    prepare_show,
)
from soloist.server.preparation.prepared import Prepared, Wanted
from soloist.server.preparation.responses import ResponsesRequest, prepare_response
from soloist.server.preparation.tokens import detokenize, tokenize
from soloist.server.problems import (
    Problem,
    problem_of,
    problem_of_fields,
    too_long_for_anthropic,
)
from soloist.text.processor import Processor


@dataclass(frozen=True, slots=True)
class Job(Generic[Wanted]):
    """How one kind of request is read.

    Attributes:
        name: of the kind.
        schema: its fields.
        prepare: what comes of them: a request for the engine, or a whole reply.
        prompt_field: where its prompt stands, for errors.
        has_template: whether a chat template has a part in it.
        is_anthropics: whether errors have the words that Anthropic's clients look for.
    """

    name: str
    schema: type[Wanted]
    prepare: Callable[[Processor, Any, str], Prepared[Wanted] | bytes]
    prompt_field: str = "prompt"
    has_template: bool = True
    is_anthropics: bool = False


CHATS = Job("chat", ChatRequest, prepare_chat, "messages")
COMPLETIONS = Job("completion", CompletionRequest, prepare_completions, has_template=False)
RESPONSES = Job("response", ResponsesRequest, prepare_response, "input")
MESSAGES = Job("message", MessagesRequest, prepare_message, "messages", is_anthropics=True)
COUNT_TOKENS = Job("count_tokens", CountRequest, count_tokens, "messages", is_anthropics=True)
OLLAMA_CHATS = Job("ollama_chat", OllamaChatRequest, prepare_ollama_chat, "messages")
OLLAMA_TEXTS = Job("ollama_text", OllamaGenerateRequest, prepare_ollama_text)
OLLAMA_SHOWS = Job("ollama_show", ShowRequest, prepare_show, has_template=False)
LLAMA_CPP = Job("llama_cpp", LlamaCppRequest, prepare_llama_cpp, has_template=False)
INFILLS = Job("infill", InfillRequest, prepare_infill, has_template=False)
TOKENIZE = Job("tokenize", TokenizeRequest, tokenize)
DETOKENIZE = Job("detokenize", DetokenizeRequest, detokenize, "tokens", has_template=False)

JOBS: dict[str, Job[Any]] = {
    job.name: job
    for job in (
        CHATS, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE,
        OLLAMA_CHATS, OLLAMA_TEXTS, OLLAMA_SHOWS, LLAMA_CPP, INFILLS,
    )
}  # fmt: skip


def run(
    job: Job[Wanted], processor: Processor, names: Sequence[str], body: bytes | bytearray
) -> Prepared[Wanted] | bytes:
    """Read one request.

    Args:
        job: its kind.
        processor: of the model.
        names: of the model, as clients may write it.
        body: as it came.

    Raises:
        Problem: it cannot be answered; says why.
    """
    try:
        asked = _checked(job, body)
        return job.prepare(processor, asked, served_name(names, asked.model))  # type: ignore[attr-defined]
    except SoloistError as error:
        if job.is_anthropics and isinstance(error, PromptTooLong):
            problem = too_long_for_anthropic(error)
        else:
            problem = problem_of(error)
        if problem.param == "prompt":
            problem.param = job.prompt_field
        raise problem from error
    except RecursionError as error:
        raise Problem(400, "the request is nested too deeply", code="invalid_value") from error


def served_name(names: Sequence[str], asked: str | None) -> str:
    """The name to reply with: the first one for none, which some clients write as an empty text.

    `:latest` may stand behind a name, as Ollama's clients write it.

    Raises:
        Problem: 404 for a name that is not served.
    """
    if not asked:
        return names[0]
    if asked not in names and asked.removesuffix(":latest") not in names:
        raise Problem(
            404,
            f"the model '{asked}' does not exist here (available: {', '.join(names)})",
            param="model",
            code="model_not_found",
        )
    return asked


def _checked(job: Job[Wanted], body: bytes | bytearray) -> Wanted:
    check_body(body)
    try:
        given = orjson.loads(body.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise Problem(400, "the body is JSON, but not an object", code="invalid_json")
    check_fields(given, job.schema)
    try:
        return job.schema.model_validate(given)
    except ValidationError as error:
        raise problem_of_fields(error) from error
