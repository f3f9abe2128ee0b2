"""`soloist info`, `plan` and `trace`: their options."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from soloist.cli import options as o
from soloist.errors import SettingError

_speculation = partial(typer.Option, rich_help_panel="Speculation")


def info(
    model: o.Model = "etude",
    context: o.Context = None,
    revision: o.Revision = None,
    adapter: o.Adapter = None,
    kv: o.Kv = None,
    accept_field: o.AcceptField = None,
    json: o.Json = False,
) -> None:
    """Show what a model is and what it needs, without loading it."""
    from soloist.cli import information

    accepted = o.accepted_fields(accept_field, told=False)
    information.show(model, context, revision, accepted, adapter, o.checked_kv(kv), as_json=json)


def plan(
    model: o.OptionalModel = None,
    config: Annotated[Path | None, typer.Option(help="A config.json instead of a model.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A GPU, such as H200 or 'RTX 4090'; default: this machine's.")
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
    kv: Annotated[
        str | None,
        typer.Option(help="Keys and values: int8, fp8 or int4; default: 16 bits."),
    ] = None,
    draft: Annotated[
        str | None,
        _speculation(
            help="Draft model, or its config.json; default: none, drafts by prompt lookup."
        ),
    ] = None,
    drafts: Annotated[
        int | None,
        _speculation(help="Draft tokens per round, 1 to 7; default: 7 by lookup, 4 by a model."),
    ] = None,
    acceptance: Annotated[
        float | None,
        _speculation(
            help="Share of draft tokens accepted; default, assumed: 0.3 by lookup, 0.7 by a model."
        ),
    ] = None,
    price: Annotated[float | None, o.cost(help="Price of one GPU per hour.")] = None,
    utilisation: o.Utilisation = 1.0,
    step: Annotated[
        str,
        o.cost(metavar="PROMPT/NEW", help="Prompt tokens and new tokens of an interactive step."),
    ] = "2000/200",
    api_price: Annotated[
        str | None,
        o.cost(
            metavar="PROMPT/NEW",
            help="API price per million tokens, such as 0.6/2.4, to compare with --price.",
        ),
    ] = None,
    revision: o.Revision = None,
    accept_field: o.AcceptField = None,
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
            accepted_fields=o.accepted_fields(accept_field),
            kv=o.checked_kv(kv),
        ),
        as_json=json,
    )


def trace(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    prompt: o.Prompt = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of the prompt if no text is given.")
    ] = 128,
    context: o.DecodeFrom = None,
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
        Path | None, typer.Option("--from", help="Show an existing trace file; needs no GPU.")
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
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    accept_field: o.AcceptField = None,
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

    _check_trace(
        source,
        {
            "MODEL": model, "--shape": shape, "--prompt": prompt, "--context": context,
            "--ablations": ablations or None, "--output": output, "--picture": picture,
            "--prompt-tokens": _unless(128, prompt_tokens), "--round": _unless(32, at_round),
            "--device": _unless("auto", device), "--precision": _unless("auto", precision),
            "--gpus": _unless("1", gpus), "--weights": weights, "--head-weights": head_weights,
            "--accept-field": accept_field,
        },
    )  # fmt: skip
    if source is not None:
        tracing.trace_again(source, picture, layer, as_json=json)
        return
    from soloist.bench.trace import Plan
    from soloist.weights.choice import Rounding

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
        rounding=Rounding(o.checked_weights(weights), o.checked_head_weights(head_weights)),
        accepted_fields=o.accepted_fields(accept_field, shape),
    )
    if ablations:
        tracing.ablate_now(plan, as_json=json)
    else:
        tracing.trace_now(plan, output or Path("trace.json"), picture, layer, as_json=json)


def _unless(default: object, value: object) -> object | None:
    """The value, or None where it is the default."""
    return None if value == default else value


def _check_trace(source: Path | None, given: dict[str, object | None]) -> None:
    """Options of `trace` that exclude each other; `given` maps names to values, None where absent.

    Raises:
        SettingError: one is there that would have no effect.
    """

    def refuse(names: tuple[str, ...], allowed: str) -> None:
        for name in names:
            if given[name] is not None:
                raise SettingError(name, str(given[name]), allowed, "leave one of the options out")

    if source is not None:
        refuse(
            tuple(name for name in given if name != "--picture"),
            "not with --from, which shows an existing trace",
        )
    if given["--ablations"] is not None:
        refuse(("--output", "--picture"), "not with --ablations, which makes no trace")
    if given["--shape"] is not None:
        refuse(("MODEL", "--prompt"), "not with --shape, which uses random weights and tokens")
    else:
        refuse(("--context",), "only with --shape")
