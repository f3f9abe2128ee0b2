"""GET /docs and /openapi.json: every request with its fields, made from the schemas themselves."""

import re
from functools import cache
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from soloist import __version__
from soloist.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    TokenizeRequest,
)
from soloist.server.preparation.llama_cpp import InfillRequest, LlamaCppRequest
from soloist.server.preparation.messages import CountRequest, MessagesRequest
from soloist.server.preparation.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from soloist.server.preparation.responses import ResponsesRequest
from soloist.server.replies import json_reply

_REQUESTS: dict[str, tuple[str, type[Fields]]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatRequest),
    "/v1/completions": ("Continue texts", CompletionRequest),
    "/v1/responses": ("Answer a conversation, in OpenAI's newer API", ResponsesRequest),
    "/v1/messages": ("Answer a conversation, in Anthropic's API", MessagesRequest),
    "/v1/messages/count_tokens": ("Count the prompt tokens of a conversation", CountRequest),
    "/api/chat": ("Answer a conversation, in Ollama's API", OllamaChatRequest),
    "/api/generate": ("Answer or continue a text, in Ollama's API", OllamaGenerateRequest),
    "/api/show": ("What the model can do, in Ollama's API", ShowRequest),
    "/completion": ("Continue a text, in llama.cpp's API", LlamaCppRequest),
    "/infill": ("Fill a gap in a text, in llama.cpp's API", InfillRequest),
    "/tokenize": ("Token ids of a prompt or of messages", TokenizeRequest),
    "/detokenize": ("The text of token ids", DetokenizeRequest),
}
_READS = {
    "/": "The playground: chat, completions and races in a browser",
    "/v1/models": "The names of the served model",
    "/v1/models/{name}": "The model of one name",
    "/api/tags": "The names of the served model, in Ollama's API",
    "/api/ps": "The same with its context",
    "/api/version": "The version of Ollama whose API this is",
    "/props": "The model and its context, in llama.cpp's API",
    "/slots": "Places for requests that run at once, in llama.cpp's API",
    "/health": "Whether requests are answered: 200 while idle or while tokens come, 503 while "
    "loading, stopping or stuck",
    "/health/ready": "The same as /health",
    "/health/live": "503 if only a restart helps; 200 also while loading and stopping",
    "/metrics": "Counters for Prometheus",
}
_ENDS = {
    ("delete", "/v1/chat/completions/{request_id}"): "End a running request by its id",
    ("delete", "/v1/completions/{request_id}"): "The same",
    ("delete", "/v1/responses/{request_id}"): "The same",
    ("delete", "/v1/messages/{request_id}"): "The same",
    ("post", "/v1/responses/{request_id}/cancel"): "The same",
}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
# As `Problem` writes them.
_ERRORS = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL,
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
}  # fmt: skip

_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
}


def prepare() -> None:
    """Make both pages, which takes 0.1 s: later, they cost nothing."""
    _openapi()
    _page()


async def openapi(_: Request) -> Response:
    """The API in OpenAPI 3.1."""
    return json_reply(_openapi())


async def page(_: Request) -> Response:
    """The same for people: one page that loads nothing else."""
    return HTMLResponse(_page(), headers=_PAGE_HEADERS)


@cache
def _openapi() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, (summary, fields) in _REQUESTS.items():
        schema = fields.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[fields.__name__] = schema
        content = {"schema": {"$ref": f"#/components/schemas/{fields.__name__}"}}
        paths[path] = {
            "post": {
                "operationId": _name("post", path),
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": content}},
                "responses": _responses(path),
            }
        }
    for path, summary in _READS.items():
        paths[path] = {"get": _bare("get", path, summary)}
    for (method, path), summary in _ENDS.items():
        paths[path] = {method: _bare(method, path, summary)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Soloist", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas | _ERRORS},
    }


def _bare(method: str, path: str, summary: str) -> dict[str, Any]:
    """An operation without a body."""
    names = re.findall(r"{(\w+)}", path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    made = {
        "operationId": _name(method, path), "summary": summary, "responses": _responses(path),
    }  # fmt: skip
    return made | ({"parameters": parameters} if parameters else {})


def _name(method: str, path: str) -> str:
    """Of an operation: post, /v1/chat/completions → post_v1_chat_completions."""
    return "_".join([method, *re.findall(r"\w+", path)])


def _responses(path: str) -> dict[str, Any]:
    """Success, and the error that any other status has."""
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {
        "200": {"description": "OK"},
        "4XX": {"description": "The request is refused; the message says why", "content": content},
        "5XX": {"description": "Not now, or the request failed", "content": content},
    }


@cache
def _page() -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Soloist API</title>"
        "<meta name=viewport content='width=device-width'>"
        "<style>body{font:16px/1.5 system-ui;max-width:56rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;width:100%}td{border-top:1px solid #8884;padding:.2rem "
        ".6rem .2rem 0;vertical-align:top}h2{overflow-wrap:anywhere}code{font-size:.9em}"
        ":root{color-scheme:light dark}@media(max-width:40rem){td{display:block;border:0;padding:0}"
        "tr{display:block;border-top:1px solid #8884;padding:.3rem 0}}"
        "</style><h1>Soloist API</h1><p>A field that is not listed is refused with a 400 that "
        "names it. <a href=/openapi.json>openapi.json</a></p>"
    ]
    for path, (summary, fields) in _REQUESTS.items():
        parts.append(f"<h2><code>POST {path}</code></h2><p>{escape(summary)}.</p><table>")
        schema = fields.model_json_schema()
        for name, field in schema["properties"].items():
            told = field.get("description", "")
            mark = " (required)" if name in schema.get("required", ()) else ""
            cells = (f"<code>{name}</code>{mark}", escape(_type(field)), escape(told))
            parts.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells))
        parts.append("</table>")
    for path, summary in _READS.items():
        parts.append(f"<h2><code>GET {path}</code></h2><p>{escape(summary)}.</p>")
    for (method, path), summary in _ENDS.items():
        parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{escape(summary)}.</p>")
    return "".join(parts)


def _type(field: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "anyOf" in field:
        kinds = dict.fromkeys(_type(kind) for kind in field["anyOf"])
        unsaid = {"null", "integer"} if "number" in kinds else {"null"}
        return " or ".join(kind for kind in kinds if kind not in unsaid)
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    return str(field.get("type", "any"))
