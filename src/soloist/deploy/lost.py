"""The last event of a stream whose replica has gone, as the clients of its path read errors."""

import orjson

from soloist.server.problems import Problem
from soloist.server.sse import event


def last_words(path: str, problem: Problem) -> bytes:
    """Behind whole events, or lines of Ollama's API: a replica's parts are never half of one."""
    if path.startswith("/v1/messages"):
        return event(problem.anthropic_body(), "error")
    if path.startswith("/v1/responses"):
        told = {"message": problem.message, "code": problem.code, "param": problem.param}
        return event({"type": "error", **told}, "error")
    if path.startswith("/api/"):
        return orjson.dumps(problem.ollama_body()) + b"\n"
    return event(problem.body())
