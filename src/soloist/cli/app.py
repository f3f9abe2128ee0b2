"""The command line: all commands by name."""

from collections.abc import Callable
from typing import Annotated

import typer

from soloist import __version__
from soloist.cli.commands import (
    analyse,
    bench,
    deploy,
    doctor,
    generate,
    kernels,
    models,
    probe,
    quantize,
    results,
    serve,
)

app = typer.Typer(
    name="soloist",
    help="An inference engine for the speed of a single request.",
    epilog="--debug, anywhere on the line, shows tracebacks. Exit status: 0 success, 1 a bug in "
    "Soloist, 2 invalid input, 3 the machine cannot run it or the engine failed, 4 slower than the "
    "baseline (bench) or stuck (serve), 5 ended by force, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(
    help="Measure speed: time to first token and decode speed, separately.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")
deploy_app = typer.Typer(help="Replicas over many machines.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"soloist {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """An inference engine for the speed of a single request."""


def _add(group: typer.Typer, *commands: Callable[..., None]) -> None:
    for command in commands:
        group.command()(command)


_add(
    app, generate.run, generate.chat, serve.serve, analyse.info, analyse.plan, analyse.trace,
    quantize.quantize,
)  # fmt: skip
_add(deploy_app, deploy.ray)
_add(app, models.pull, models.rm, doctor.doctor)
app.command("list")(models.list_)
app.command("compile")(kernels.compile_)
_add(
    bench_app, bench.decode, bench.startup, bench.accuracy, bench.prefill, probe.serve, probe.agent,
    probe.neighbours, bench.bandwidth, results.compare, results.report,
)  # fmt: skip
