"""The commands and their options; what they do is in the modules beside this one."""

from pathlib import Path
from typing import Annotated

import typer

from soloist import __version__
from soloist.cli import benching, probing
from soloist.cli import options as o
from soloist.errors import SettingError

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
_SHAPE, _SPECULATION, _COST = "With --shape", "Speculation", "Cost"
bench_app = typer.Typer(
    help="Measure speed: time to first token and decode speed, separately.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"soloist {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """An inference engine for the speed of a single request."""


@app.command()
def run(
    model: o.Model = "etude",
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Text to continue; '-' reads it from stdin."),
    ] = None,
    suffix: Annotated[
        str | None,
        typer.Option(help="Text after the gap, for models trained to fill in the middle."),
    ] = None,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = None,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = None,
    logit_bias: o.LogitBias = None,
    stop: o.Stop = None,
    stop_id: o.StopId = None,
    min_tokens: o.MinTokens = 0,
    ignore_eos: o.IgnoreEos = False,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    context: o.Context = None,
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Generate text from a prompt and show the speed.

    The text streams to stdout. Time to first token, decode speed and totals go to stderr.
    """
    from soloist.cli.early import begin

    upload = begin(model, device, gpus, revision)
    from soloist.cli import generation
    from soloist.engine import EngineConfig
    from soloist.sampling import SamplingParams

    text = generation.read_prompt(prompt)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        logit_bias=o.parsed_bias(logit_bias),
        stop=tuple(stop or ()),
        stop_token_ids=frozenset(stop_id or ()),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    checked = o.checked_precision(precision)
    # One request: what others would need is not worth waiting for.
    asked = EngineConfig(
        model, device, checked, context, revision, prepare=False, gpus=o.parsed_gpus(gpus)
    )
    generation.run(asked, text, suffix, params, upload, as_json=json)


@app.command()
def chat(
    model: o.Model = "etude",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = None,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = None,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    context: o.Context = None,
    revision: o.Revision = None,
) -> None:
    """Chat with a model, using its own chat template.

    Ctrl-C ends an answer, /reset forgets the conversation, /exit or Ctrl-D quits.
    """
    from soloist.cli.early import begin

    upload = begin(model, device, gpus, revision)
    from soloist.cli import conversation
    from soloist.engine import EngineConfig
    from soloist.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
    )
    # Every turn begins as the last one did.
    asked = EngineConfig(
        model, device, o.checked_precision(precision), context, revision,
        keeps_prefixes=True, host_cache_bytes=0, gpus=o.parsed_gpus(gpus),
    )  # fmt: skip
    conversation.chat(asked, system, params, upload)


@app.command()
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
            "repeated; '*' for any. Default: any name, or only local names if --host is local.",
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
        float,
        typer.Option(help="End the server after so many seconds without progress; 0: never."),
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
    context: o.Context = None,
    revision: o.Revision = None,
) -> None:
    """Serve a model over HTTP, for clients of OpenAI's and Anthropic's APIs.

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
        gpus=o.parsed_gpus(gpus),
    )  # fmt: skip
    serving.serve(asked, config, upload, logs=logs, shows_text=log_text)


@app.command()
def info(
    model: o.Model = "etude",
    context: o.Context = None,
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Show what a model is and what it needs, without loading it."""
    from soloist.cli import information

    information.show(model, context, revision, as_json=json)


@app.command()
def plan(
    model: o.OptionalModel = None,
    config: Annotated[Path | None, typer.Option(help="A config.json instead of a model.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="A GPU, such as H200 or 'RTX 4090'; default: this machine's."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of context at every step; default: 8192, or the model's own if shorter."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs: 1, 2, 4 or 8; default: one row each.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Weights: fp16, bf16, fp8, int4 or fp4; default: one row each."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model, or its config.json; default: none, drafts by prompt lookup.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    drafts: Annotated[
        int | None,
        typer.Option(
            help="Draft tokens per round, 1 to 7; default: 7 by lookup, 4 by a model.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Share of draft tokens accepted; default, assumed: 0.3 by lookup, 0.7 by a model.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of one GPU per hour.", rich_help_panel=_COST)
    ] = None,
    utilisation: Annotated[
        float,
        typer.Option(
            help="Share of the paid hours in which the machine serves requests.",
            rich_help_panel=_COST,
        ),
    ] = 1.0,
    step: Annotated[
        str,
        typer.Option(
            metavar="PROMPT/NEW",
            help="Prompt tokens and new tokens of an interactive step.",
            rich_help_panel=_COST,
        ),
    ] = "2000/200",
    api_price: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT/NEW",
            help="API price per million tokens, such as 0.6/2.4, to compare with --price.",
            rich_help_panel=_COST,
        ),
    ] = None,
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Estimate memory and speed of a model on a machine, and what limits the speed.

    For one request, with and without speculation. Nothing is loaded, and the machine need not be
    this one. With --price, also the cost of tokens and steps.
    """
    from soloist.cli import planning

    if config is not None and model is not None:
        raise SettingError("MODEL", model, "only without --config", "leave one of the two out")
    if price is None and (utilisation, step, api_price) != (1.0, "2000/200", None):
        raise SettingError(
            "--price", "missing", "a number, which --utilisation, --step and --api-price need"
        )
    planning.show(
        planning.Asked(
            model=model or o.DEFAULT_MODEL,
            file=config,
            hardware=hardware,
            context=context,
            gpus=gpus,
            precision=precision,
            revision=revision,
            draft=draft,
            drafts=drafts,
            acceptance=acceptance,
            price=price,
            utilisation=utilisation,
            step=step,
            api_price=api_price,
        ),
        as_json=json,
    )


@app.command()
def trace(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Prompt text; default: Python source code.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of the prompt if no text is given.")
    ] = 128,
    context: Annotated[
        int | None,
        typer.Option(
            help="Decode from this position on, over a random KV cache.", rich_help_panel=_SHAPE
        ),
    ] = None,
    at_round: Annotated[
        int,
        typer.Option(
            "--round", help="Round after the prompt to trace; with --ablations, rounds to time."
        ),
    ] = 32,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations",
            help="Instead, time kernels without waits, without weight loads or without multiplies.",
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Show an existing trace file; needs no GPU."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw one layer of the trace to this SVG file.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Which layer to draw; default: the middle one.")
    ] = None,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Trace file to write, for ui.perfetto.dev; default: trace.json."
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Show where a token's time goes in the decode kernel, by the GPU's own time stamps.

    Prints the time of each phase: waiting for other blocks, multiplying and finishing. Writes a
    file that shows every block in Perfetto.
    """
    from soloist.cli import tracing

    o.check_trace(
        source,
        {
            "MODEL": model, "--shape": shape, "--prompt": prompt, "--context": context,
            "--ablations": ablations or None, "--output": output, "--picture": picture,
            "--prompt-tokens": o.unless(128, prompt_tokens), "--round": o.unless(32, at_round),
            "--device": o.unless("auto", device), "--precision": o.unless("auto", precision),
            "--gpus": o.unless("1", gpus),
        },
    )  # fmt: skip
    if source is not None:
        tracing.trace_again(source, picture, layer, as_json=json)
        return
    from soloist.bench.trace import Plan

    checked = o.checked_precision(precision)
    plan = Plan(
        model=model or o.DEFAULT_MODEL,
        shape=shape,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        context=context,
        at_round=at_round,
        device=device,
        precision=checked,
        gpus=o.parsed_gpus(gpus),
    )
    if ablations:
        tracing.ablate_now(plan, as_json=json)
    else:
        tracing.trace_now(plan, output or Path("trace.json"), picture, layer, as_json=json)


@bench_app.command("decode")
def bench_decode(
    model: o.OptionalModel = None,
    shape: Annotated[
        Path | None,
        typer.Option(
            help="A config.json, with random weights, instead of a model.",
            rich_help_panel=_SHAPE,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    runs: Annotated[int, typer.Option(help="Timed runs after one to warm up.")] = 5,
    against: Annotated[
        str | None,
        typer.Option(help="Also measure this engine on the same weights, in turns: transformers."),
    ] = None,
    columns: Annotated[
        int,
        typer.Option(help="Tokens of each sequence in one step.", rich_help_panel=_SHAPE),
    ] = 1,
    sequences: Annotated[
        int, typer.Option(help="Sequences decoded together.", rich_help_panel=_SHAPE)
    ] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            help="Decode from this position on, over a random KV cache.", rich_help_panel=_SHAPE
        ),
    ] = None,
    busy: o.Busy = 0,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time to first token and decode speed of one greedy request, in this process."""
    from soloist.bench import decode, record
    from soloist.bench import shape as shapes
    from soloist.cli import tables
    from soloist.engine import EngineConfig

    checked = o.checked_precision(precision)
    o.check_shape(shape, model, against, columns, sequences, context)
    known = benching.read_baseline(baseline, threshold)
    if shape is not None:
        rows = shapes.measure(
            shapes.Plan(
                file=shape,
                device=device,
                precision=checked,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                runs=runs,
                columns=columns,
                sequences=sequences,
                context=context,
                gpus=o.parsed_gpus(gpus),
                num_busy=busy,
            )
        )
    else:
        asked = EngineConfig(model or o.DEFAULT_MODEL, device, checked, gpus=o.parsed_gpus(gpus))
        rows = decode.measure(decode.Plan(asked, prompt_tokens, new_tokens, runs, against, busy))
    if output is not None:
        record.write(output, rows)
    tables.show_rows(rows, as_json=json)
    benching.warn_of_others(rows)
    benching.hold_against(known, rows)


@bench_app.command("startup")
def bench_startup(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    runs: Annotated[int, typer.Option(help="Timed processes after one to warm up.")] = 3,
    kernel_cache: Annotated[
        str, typer.Option(help="warm: all kernels are compiled; cold: none is; or both.")
    ] = "both",
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time from starting `soloist run` to its first token, with and without compiled kernels."""
    from soloist.bench import record, startup
    from soloist.cli import tables

    checked = o.checked_precision(precision)
    o.check_only_one(shape, model)
    known = benching.read_baseline(baseline, threshold)
    plan = startup.Plan(
        model or o.DEFAULT_MODEL, shape, device, checked, runs, o.parsed_gpus(gpus),
        benching.checked_kernel_caches(kernel_cache),
    )  # fmt: skip
    rows = startup.measure(plan)
    if output is not None:
        record.write(output, rows)
    tables.show_startup(rows, as_json=json)
    benching.warn_of_others(rows)
    benching.hold_against(known, rows)


@bench_app.command("accuracy")
def bench_accuracy(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file; default: Python source code, or random tokens with --shape."),
    ] = None,
    positions: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 512,
    against: Annotated[
        str | None, typer.Option(help="Also compare this engine with fp32: transformers.")
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(help="Also run so many equal launches of 64 tokens and compare their bits."),
    ] = 0,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    output: o.Output = None,
    json: o.Json = False,
) -> None:
    """How far 16-bit logits are from fp32 arithmetic, at each position of a given text.

    On the decode kernel, also checks that batching and separate launches change no bit.
    """
    from soloist.bench import accuracy, record
    from soloist.cli import tables

    checked = o.checked_precision(precision)
    o.check_only_one(shape, model)
    plan = accuracy.Plan(
        model=model or o.DEFAULT_MODEL,
        shape=shape,
        text=text,
        positions=positions,
        against=against,
        repeats=repeats,
        device=device,
        precision=checked,
        gpus=o.parsed_gpus(gpus),
    )
    rows = accuracy.measure(plan)
    if output is not None:
        record.write(output, rows)
    tables.show_accuracy(rows, as_json=json)


bench_app.command("prefill")(benching.prefill)
bench_app.command("serve")(probing.serve)
bench_app.command("agent")(probing.agent)
bench_app.command("neighbours")(probing.neighbours)
bench_app.command("bandwidth")(benching.bandwidth)
bench_app.command("compare")(benching.compare)
bench_app.command("report")(benching.report)
