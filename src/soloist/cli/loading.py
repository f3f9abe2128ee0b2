"""Load a model before the user's eyes: what it is, how far it has come, how fast it went."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from soloist.cli.terminal import status, status_line
from soloist.engine import Engine, EngineConfig
from soloist.weights.reading import LoadProgress
from soloist.weights.upload import Upload


def load_engine(asked: EngineConfig, upload: Upload | None, *, quiet: bool = False) -> Engine:
    """Load with a progress bar where stderr is a terminal, and say what was loaded.

    `upload` is of the model's files, if they are on their way to its GPU.
    """
    if quiet:
        return Engine.load(asked, upload=upload)
    with progress_bar("loading") as advance:
        engine = Engine.load(asked, advance, upload)
    if engine.report.refusal:
        status(engine.report.refusal)
    status(status_line(engine))
    return engine


@contextmanager
def progress_bar(verb: str) -> Iterator[Callable[[LoadProgress], None]]:
    """What shows how far it has come: a bar where stderr is a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (
        TextColumn(verb),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rate]:.2f} GB/s"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, rate=0.0)

        def advance(p: LoadProgress) -> None:
            bar.update(task, completed=p.done_bytes, total=p.total_bytes, rate=p.gb_per_s)

        yield advance
