"""`soloist bench serve`: measurements that need no model here."""

from typing import Annotated

import typer

from soloist.cli import options as o
from soloist.errors import SettingError


def serve(
    url: Annotated[str, typer.Argument(help="Of the server, such as http://localhost:8000.")],
    api: Annotated[str, typer.Option(help="Route to use: chat, completions.")] = "chat",
    model: Annotated[
        str | None, typer.Option(help="As the server calls it; default: the first it lists.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the engine, for the rows; default: the address.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text; default: Python text.")
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the prompt as the server counts it; may be repeated.",
            show_default="256",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 256,
    runs: Annotated[int, typer.Option(help="Timed runs after one to warm up.")] = 5,
    prefix: Annotated[
        str,
        typer.Option(
            help="cold: prompts that begin differently each time; warm: one prompt; or both."
        ),
    ] = "both",
    output: o.Output = None,
    json: o.Json = False,
) -> None:
    """Time to first token and decode speed of any OpenAI-compatible server, one request at a time.

    Tokens are counted by the server, in every chunk or at the end; chunks are not counted.
    """
    from soloist.bench import record
    from soloist.bench import serve as bench_serve
    from soloist.cli import tables

    if prompt is not None and prompt_tokens:
        raise SettingError("--prompt-tokens", prompt_tokens[0], "without --prompt")
    if api not in ("chat", "completions"):
        raise SettingError("--api", api, "chat, completions")
    prefixes: dict[str, tuple[bench_serve.Prefix, ...]] = {
        "cold": ("cold",), "warm": ("warm",), "both": ("cold", "warm"),
    }  # fmt: skip
    if prefix not in prefixes:
        raise SettingError("--prefix", prefix, ", ".join(prefixes))
    rows = bench_serve.measure(
        bench_serve.Plan(
            url=url,
            api="chat" if api == "chat" else "completions",
            model=model,
            key=api_key,
            name=name,
            prompt=prompt,
            prompt_tokens=tuple(prompt_tokens or (256,)),
            max_tokens=max_tokens,
            runs=runs,
            prefixes=prefixes[prefix],
        )
    )
    if output is not None:
        record.write(output, rows)
    tables.show_serve(rows, as_json=json)
