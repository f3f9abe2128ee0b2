"""`soloist chat`: a conversation through the model's own template."""

import sys

from soloist.cli.generation import stream_answer
from soloist.cli.loading import load_engine
from soloist.cli.terminal import figures, status
from soloist.engine import EngineConfig
from soloist.errors import RequestError
from soloist.sampling import SamplingParams
from soloist.text import Message
from soloist.weights.upload import Upload


def chat(
    asked: EngineConfig, system: str | None, params: SamplingParams, upload: Upload | None
) -> None:
    """Read lines, answer each; a turn that cannot be served is refused and forgotten."""
    engine = load_engine(asked, upload)
    engine.chat_template  # noqa: B018 - a model without a template is refused before the first line
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() history and editing

        status("Ctrl-C ends an answer · /reset forgets the conversation · /exit quits")
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            status("conversation forgotten")
        elif line.startswith("/"):
            status(f"unknown command {line.split()[0]} (known: /reset, /exit)")
        elif line:
            asked_now: list[Message] = [*messages, {"role": "user", "content": line}]
            try:
                completion = stream_answer(engine, engine.encode_chat(asked_now), params, echo=True)
            except RequestError as error:
                status(f"error: {error}")
                continue
            status(figures(completion))
            messages = [*asked_now, {"role": "assistant", "content": completion.text}]


def _read_line() -> str | None:
    """The next line, None at the end of input; Ctrl-C at the prompt clears the line."""
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline()
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return ""
    return line.strip() if line else None
