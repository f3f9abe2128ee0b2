"""`soloist bench serve`, `agent` and `neighbours`: servers, measured from outside."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.cli import options as o
from soloist.cli.commands import results
from soloist.errors import ServerFailed, SettingError

if TYPE_CHECKING:
    from soloist.bench.client import Api, Target
    from soloist.bench.traffic import Traffic

_APIS: "dict[str, Api]" = {"chat": "chat", "completions": "completions"}
_mbu = partial(typer.Option, rich_help_panel="Memory-bandwidth utilisation")
_Urls = Annotated[
    list[str],
    typer.Argument(
        metavar="URL...", help="A server, such as http://localhost:8000; several take turns."
    ),
]
_Api = Annotated[str, typer.Option(help="Route to use: chat, completions.")]
_ServedModel = Annotated[
    list[str] | None,
    typer.Option(help="Name on the servers, one for all or one each; default: the first listed."),
]
_ApiKey = Annotated[
    list[str] | None, typer.Option(help="Sent as a bearer token; with several servers, one each.")
]
_Name = Annotated[
    list[str] | None,
    typer.Option(help="Engine name in the results, one each; default: the address."),
]


def _targets(
    urls: list[str],
    api: "Api",
    models: list[str] | None,
    keys: list[str] | None,
    names: list[str] | None,
) -> "list[Target]":
    """The servers with their options; a key goes to no other one than it was given for.

    Raises:
        SettingError: not as many of them as there are servers.
    """
    from soloist.bench.client import Target

    if models is not None and len(models) == 1:
        models = models * len(urls)
    each: list[Sequence[str | None]] = []
    for option, given in (("--model", models), ("--api-key", keys), ("--name", names)):
        if given is not None and len(given) != len(urls):
            allowed = f"given {len(urls)} times, once for each URL"
            raise SettingError(option, f"given {len(given)} times", allowed)
        each.append(given or [None] * len(urls))
    return [Target(url, api, *options) for url, *options in zip(urls, *each, strict=True)]


def _read_traffic(
    config: Path | None, precision: str | None, bandwidth: Path | None, gpus: int
) -> "Traffic | None":
    """What the options tell together; None without them."""
    from soloist.bench.traffic import read_traffic

    if config is None and precision is None and bandwidth is None:
        if gpus != 1:
            raise SettingError("--gpus", gpus, "only with --config, --precision and --bandwidth")
        return None
    if config is None or precision is None or bandwidth is None:
        given = [str(x) for x in (config, precision, bandwidth) if x is not None]
        raise SettingError(
            "--config, --precision and --bandwidth", ", ".join(given), "all three, for MBU, or none"
        )
    return read_traffic(config, precision, bandwidth, gpus)


def serve(
    urls: _Urls,
    api: _Api = "chat",
    model: _ServedModel = None,
    api_key: _ApiKey = None,
    name: _Name = None,
    prompt: o.Prompt = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the prompt as the server counts it; may be repeated.",
            show_default="256",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")
    ] = 256,
    runs: o.Runs = 5,
    prefix: Annotated[
        str,
        typer.Option(
            help="cold: each prompt begins differently; warm: always the same prompt; or both."
        ),
    ] = "both",
    config: Annotated[
        Path | None, _mbu(help="The model's config.json, for bytes per token.")
    ] = None,
    precision: Annotated[
        str | None, _mbu(help="Weights in the server: fp32, bf16, fp16, fp8, int4 or fp4.")
    ] = None,
    bandwidth_file: Annotated[
        Path | None,
        _mbu(
            "--bandwidth",
            help="Result file of soloist bench bandwidth, made on the server's machine.",
        ),
    ] = None,
    gpus: Annotated[int, _mbu(help="GPUs that run the model in the server.")] = 1,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time to first token and decode speed of any OpenAI-compatible server, one request at a time.

    The server counts the tokens, in every chunk or at the end; chunks are not counted as tokens.
    Several servers take turns, run by run.
    """
    from soloist.bench import serve as bench_serve
    from soloist.cli import tables

    if prompt is not None and prompt_tokens:
        raise SettingError("--prompt-tokens", prompt_tokens[0], "only without --prompt")
    prefixes = o.chosen("--prefix", prefix, o.PREFIXES)
    known = results.read_baseline(baseline, threshold)
    traffic = _read_traffic(config, precision, bandwidth_file, gpus)
    route = o.chosen("--api", api, _APIS)
    plan = bench_serve.Plan(
        prompt=prompt,
        prompt_tokens=tuple(prompt_tokens or (256,)),
        max_tokens=max_tokens,
        runs=runs,
        prefixes=prefixes,
        traffic=traffic,
    )
    rows = bench_serve.measure(plan, _targets(urls, route, model, api_key, name))
    results.show(rows, tables.show_serve, output, as_json=json)
    results.hold_against(known, rows)


def agent(
    urls: _Urls,
    api: _Api = "chat",
    model: _ServedModel = None,
    api_key: _ApiKey = None,
    name: _Name = None,
    turns: Annotated[int, typer.Option(help="Steps per loop.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of the first prompt, at four characters a token.")
    ] = 2000,
    tool_tokens: Annotated[
        int, typer.Option(help="Length of the tool result before each further step, likewise.")
    ] = 500,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")
    ] = 128,
    runs: Annotated[int, typer.Option(help="Timed loops after one to warm up.")] = 3,
    price: Annotated[float | None, o.cost(help="Price of the server's machine per hour.")] = None,
    utilisation: o.Utilisation = 1.0,
    api_price: Annotated[
        str | None,
        o.cost(
            metavar="PROMPT/NEW",
            help="Price per million tokens, such as 0.6/2.4; or PROMPT/CACHED/NEW.",
        ),
    ] = None,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time and cost of an agent's steps: a growing conversation with any OpenAI-compatible server.

    Each step sends the conversation so far, answers included, and the result of a tool.
    """
    from soloist.bench import agent as bench_agent
    from soloist.cli import tables
    from soloist.planning.cost import read_api_prices, read_machine

    machine = None if price is None else read_machine(price, utilisation)
    if machine is None and utilisation != 1.0:
        raise SettingError("--utilisation", utilisation, "only with --price")
    known = results.read_baseline(baseline, threshold)
    route = o.chosen("--api", api, _APIS)
    api_prices = None if api_price is None else read_api_prices(api_price)
    plan = bench_agent.Plan(
        turns=turns,
        prompt_tokens=prompt_tokens,
        tool_tokens=tool_tokens,
        max_tokens=max_tokens,
        runs=runs,
        machine=machine,
        api_prices=api_prices,
    )
    rows = bench_agent.measure(plan, _targets(urls, route, model, api_key, name))
    results.show(rows, tables.show_agent, output, as_json=json)
    results.hold_against(known, rows)


def neighbours(
    url: Annotated[str, typer.Argument(help="A server, such as http://localhost:8000.")],
    api: _Api = "chat",
    model: Annotated[
        str | None, typer.Option(help="Name on the server; default: the first listed.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Engine name in the results; default: the address.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Kind of neighbour; may be repeated. Default: all."),
    ] = None,
    pid: Annotated[
        str | None,
        typer.Option(
            help="Process id of a server on this machine, to measure its memory; 'auto': the "
            "process that listens on the URL's port."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens of the stream.")
    ] = 256,
    runs: Annotated[int, typer.Option(help="Runs for each kind of neighbour.")] = 3,
    patience: Annotated[
        float, typer.Option(help="Seconds after which a neighbour without an answer hangs up.")
    ] = 120.0,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """What other clients' requests do to a stream of any OpenAI-compatible server.

    One greedy stream is read alone, then beside large bodies of many kinds, a long prompt and a
    health prober. For each: its speed, its longest gaps, whether its text changed, how the
    neighbour's request ended, how long GET /health took, and what memory it cost.
    """
    from soloist.bench import neighbours as bench_neighbours
    from soloist.bench.client import Target
    from soloist.cli import tables

    route = o.chosen("--api", api, _APIS)
    known = results.read_baseline(baseline, threshold)
    plan = bench_neighbours.Plan(
        target=Target(url, route, model, api_key, name),
        kinds=tuple(only or ()),
        pid=_checked_pid(pid, url),
        max_tokens=max_tokens,
        runs=runs,
        patience_s=patience,
    )
    rows = bench_neighbours.measure(plan)
    results.show(rows, tables.show_neighbours, output, as_json=json)
    if left := bench_neighbours.unmeasured(plan, rows):
        told = f"the server stopped answering beside {rows[-1].neighbour}; not measured: "
        told += ", ".join(left)
        raise ServerFailed(url, told, "see the server's own log, and start it again")
    results.hold_against(known, rows)


def _checked_pid(given: str | None, url: str) -> int | None:
    from soloist.bench.process_memory import listener

    if given is None:
        return None
    if given == "auto":
        return listener(url)
    if not given.isdecimal():
        raise SettingError("--pid", given, "the number of a process, or auto")
    return int(given)
