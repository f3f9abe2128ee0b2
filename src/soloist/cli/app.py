"""The command line: all commands by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated

import typer

from soloist import __version__

# In the order of --help: where the function of each command is, below `soloist.cli.commands`.
_COMMANDS = {
    "run": "generate.run",
    "chat": "generate.chat",
    "serve": "serve.serve",
    "info": "analyse.info",
    "plan": "analyse.plan",
    "trace": "analyse.trace",
    "quantize": "quantize.quantize",
    "pull": "models.pull",
    "rm": "models.rm",
    "doctor": "doctor.doctor",
    "list": "models.list_",
    "compile": "kernels.compile_",
}
_GROUPS = {
    "bench": (
        "Measure speed: time to first token and decode speed, separately.",
        {
            "decode": "bench.decode",
            "startup": "bench.startup",
            "accuracy": "bench.accuracy",
            "prefill": "bench.prefill",
            "serve": "probe.serve",
            "agent": "probe.agent",
            "neighbours": "probe.neighbours",
            "bandwidth": "bench.bandwidth",
            "compare": "results.compare",
            "report": "results.report",
        },
    ),
    "deploy": ("Replicas over many machines.", {"ray": "deploy.ray"}),
}


def app(named: str = "") -> typer.Typer:
    """The command line.

    Args:
        named: the command, or group of commands, that will run: the options of all others take a
            tenth of the time before a model is read. Any other word asks for all.
    """
    made = typer.Typer(
        name="soloist",
        help="An inference engine for the speed of a single request.",
        epilog="--debug, anywhere on the line, shows tracebacks. Exit status: 0 success, 1 a bug "
        "in Soloist, 2 invalid input, 3 the machine cannot run it or the engine failed, 4 slower "
        "than the baseline (bench) or stuck (serve), 5 ended by force, 130 Ctrl-C.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_root,
    )
    asks_for_all = named not in _COMMANDS and named not in _GROUPS
    _add(made, {k: v for k, v in _COMMANDS.items() if asks_for_all or k == named})
    for name, (text, commands) in _GROUPS.items():
        if asks_for_all or name == named:
            group = typer.Typer(help=text, no_args_is_help=True)
            _add(group, commands)
            made.add_typer(group, name=name)
    return made


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"soloist {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """An inference engine for the speed of a single request."""


def _add(group: typer.Typer, commands: Mapping[str, str]) -> None:
    for name, place in commands.items():
        module, _, function = place.partition(".")
        found = import_module(f"soloist.cli.commands.{module}")
        command: Callable[..., None] = getattr(found, function)
        group.command(name)(command)
