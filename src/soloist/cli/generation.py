"""`soloist run`: one prompt in, text out as it comes, figures at the end."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from soloist.cli.loading import load_engine
from soloist.cli.terminal import figures, print_json, status, status_line
from soloist.engine import Cancel, Chunk, Completion, Engine, EngineConfig
from soloist.errors import UserError
from soloist.sampling import SamplingParams
from soloist.weights.upload import Upload


def read_prompt(given: str | None) -> str:
    """The prompt from the option or from stdin.

    Raises:
        UserError: neither is there, or stdin is not UTF-8.
    """
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise UserError(
            "no prompt was given", "write --prompt 'def main():', or pipe text in with --prompt -"
        )
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"stdin is not UTF-8 text: {error}", "convert the input to UTF-8"
        ) from error


def read_prediction(file: Path) -> str:
    """A text that the answer will mostly repeat.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"the prediction {file} is not UTF-8 text: {error}", "convert the file to UTF-8"
        ) from error
    except OSError as error:
        raise UserError(
            f"the prediction {file} cannot be read: {error.strerror}", "name a text file"
        ) from error


def run(
    asked: EngineConfig,
    prompt: str,
    suffix: str | None,
    params: SamplingParams,
    upload: Upload | None,
    *,
    as_json: bool,
    prediction: str | None = None,
) -> None:
    """Generate once and print."""
    engine = load_engine(asked, upload, quiet=as_json)
    given = prompt if suffix is None else engine.tokenizer.fim_prompt(prompt, suffix)
    if prediction is not None and engine.model.drafting is None:
        status("the prediction is not used: this model checks no drafts here")
    completion = stream_answer(engine, given, params, echo=not as_json, prediction=prediction)
    if as_json:
        print_json(report(engine, completion))
    else:
        status(figures(completion))


def stream_answer(
    engine: Engine,
    prompt: str | list[int],
    params: SamplingParams,
    *,
    echo: bool,
    prediction: str | None = None,
) -> Completion:
    """Print the answer as it comes; Ctrl-C ends it at the next token and keeps the figures."""
    with interruptible() as cancel:
        for event in engine.generate(prompt, params, cancel, prediction=prediction):
            if isinstance(event, Completion):
                if echo:
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                return event
            if echo:
                show(event)
    raise AssertionError("a request ends with a completion")


def show(chunk: Chunk) -> None:
    """Write text at once, in whatever encoding stdout has."""
    if chunk.text:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()


@contextmanager
def interruptible() -> Iterator[Cancel]:
    """A cancel that the first Ctrl-C sets; the second one ends the program as usual."""
    cancel = Cancel()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if cancel.requested:
            signal.default_int_handler(number, frame)
        cancel()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def report(engine: Engine, completion: Completion) -> dict[str, object]:
    """Everything about one request, for machines."""
    t, memory = completion.timings, engine.gpu_memory()
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "timings": {
            **asdict(t),
            "decode_tokens_per_s": t.decode_tokens_per_s,
            "tokens_per_round": t.tokens_per_round,
        },
        "load_s": engine.report.load_s,
        "model": status_line(engine),
        "device": engine.report.place,
        "executor": engine.report.executor,
        "adapter": engine.report.adapter or None,
        "precision": engine.resolved.dtype.value,
        "weights": engine.report.weights,
        "kv": engine.resolved.kv.name,
        "context_tokens": engine.resolved.context_tokens,
        "checkpoint_bytes": engine.report.checkpoint_bytes,
        "gpu_memory": None if memory is None else asdict(memory),
    }
