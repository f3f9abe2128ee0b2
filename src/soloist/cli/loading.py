"""Load a model before the user's eyes: what it is, how far it has come, how fast it went."""

import sys

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
    with_bar = sys.stderr.isatty()
    engine = _load_with_bar(asked, upload) if with_bar else Engine.load(asked, upload=upload)
    if engine.report.refusal:
        status(engine.report.refusal)
    status(status_line(engine))
    return engine


def _load_with_bar(asked: EngineConfig, upload: Upload | None) -> Engine:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rate]:.2f} GB/s"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, rate=0.0)

        def advance(p: LoadProgress) -> None:
            bar.update(task, completed=p.done_bytes, total=p.total_bytes, rate=p.gb_per_s)

        return Engine.load(asked, advance, upload)
