"""`soloist serve`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from soloist.cli import options as o


def serve(
    model: o.Model = "etude",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model for clients; may be repeated. Default: MODEL."),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; may be repeated.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of API keys, one a line.")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name, without port, to accept in the Host header besides local names; may be "
            "repeated; '*' for any. Default: any name, or only local names if --host is local."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Accept requests from web pages of this origin; may be repeated; '*' for all."
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option(help="Requests that run at once, 1 to 8; further ones wait.")
    ] = 8,
    queue: Annotated[
        int, typer.Option(help="Requests that may wait; further ones get a 429.")
    ] = 64,
    flush_ms: Annotated[
        float,
        typer.Option(help="Least milliseconds between writes to a stream; 0 writes each token."),
    ] = 1.0,
    max_body_mb: Annotated[int, typer.Option(help="Largest request body, in MiB.")] = 32,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which a request is aborted.")
    ] = 3600.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGTERM.")
    ] = 10.0,
    stall_timeout: Annotated[
        float, typer.Option(help="End the server after so many seconds without progress; 0: never.")
    ] = 120.0,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            help="Cache keys and values of prompts for later prompts with the same prefix."
        ),
    ] = True,
    host_cache_gb: Annotated[
        float | None,
        typer.Option(
            help="Most host memory, in GB, for prefix cache that does not fit the GPU.",
            show_default="a quarter of free memory",
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder where cached prompts are saved, and found again after a restart.",
            show_default="none",
        ),
    ] = None,
    cache_dir_gb: Annotated[
        float | None,
        typer.Option(
            help="Most GB of files in --cache-dir; the least recently used ones go first.",
            show_default="20",
        ),
    ] = None,
    logs: Annotated[
        bool, typer.Option(help="Log a line for each request, without its text.")
    ] = True,
    log_text: Annotated[
        bool,
        typer.Option(
            "--log-text", help="Also log the text where a prompt differs from a cached one."
        ),
    ] = False,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    context: o.Context = None,
    revision: o.Revision = None,
    adapter: o.Adapter = None,
    accept_field: o.AcceptField = None,
    speculate: o.Speculate = "auto",
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs.

    Without MODEL it serves étude, the small model that ships with Soloist, to try clients.
    The port opens at once; requests get a 503 until the model is loaded. After SIGTERM or Ctrl-C,
    running requests have --shutdown-timeout seconds to finish.
    """
    from soloist.cli.early import begin

    upload = begin(model, device, gpus, revision)
    from soloist.cli import serving
    from soloist.engine import EngineConfig
    from soloist.server.config import ServerConfig

    config = ServerConfig(
        names=serving.names_of(model, name),
        host=host,
        port=port,
        api_keys=serving.read_keys(api_key, api_key_file),
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        most_waiting=queue,
        flush_ms=flush_ms,
        most_body_bytes=max_body_mb * 2**20,
        request_s=request_timeout,
        shutdown_s=shutdown_timeout,
        stall_s=stall_timeout,
    )
    checked = o.checked_precision(precision)
    asked = EngineConfig(
        model, device, checked, context, revision,
        sequences=sequences, keeps_prefixes=prefix_cache, measures_bandwidth=True,
        host_cache_bytes=None if host_cache_gb is None else round(host_cache_gb * 1e9),
        cache_dir=cache_dir,
        cache_dir_bytes=None if cache_dir_gb is None else round(cache_dir_gb * 1e9),
        gpus=o.parsed_gpus(gpus),
        weights=o.checked_weights(weights), head_weights=o.checked_head_weights(head_weights),
        kv=o.checked_kv(kv),
        accepted_fields=o.accepted_fields(accept_field, told=False), adapter=adapter,
        speculates=o.speculates(speculate),
    )  # fmt: skip
    serving.serve(asked, config, upload, logs=logs, shows_text=log_text)
