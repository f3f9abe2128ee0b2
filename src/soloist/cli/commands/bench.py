"""`soloist bench decode`, `prefill`, `startup`, `accuracy`, `bandwidth`: in this process."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soloist.cli import options as o
from soloist.cli.commands import results
from soloist.errors import SettingError

if TYPE_CHECKING:
    from soloist.bench.rows import KernelCache

_KERNEL_CACHES: "dict[str, tuple[KernelCache, ...]]" = {
    "warm": ("warm",), "compiled": ("compiled",), "cold": ("cold",), "both": ("warm", "cold"),
}  # fmt: skip


def decode(
    model: o.OptionalModel = None,
    shape: Annotated[
        Path | None, o.with_shape(help="A config.json, with random weights, instead of a model.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
    runs: o.Runs = 5,
    against: Annotated[
        str | None,
        typer.Option(help="Also measure this engine on the same weights, in turns: transformers."),
    ] = None,
    columns: Annotated[
        int, typer.Option(help="Tokens of a sequence in one step; more than 1 on a GPU only.")
    ] = 1,
    prediction: Annotated[
        bool,
        typer.Option(
            "--prediction",
            help="Also measure with the answer itself as its prediction.",
        ),
    ] = False,
    wrong: Annotated[
        float, typer.Option(help="With --prediction: share of its tokens that are replaced.")
    ] = 0.0,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Begin with this file, not with a module of Python's library. What follows its "
            "first tokens is then the prediction.",
        ),
    ] = None,
    speculate: Annotated[
        str, typer.Option(help="auto: also measure with drafts that are looked up; or off.")
    ] = "off",
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sample at this temperature, with seed 0; 0 is greedy.",
            show_default="0; with --prediction and --speculate auto 1",
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Also measure this model, in turns, such as the same one in another format; may "
            "be repeated.",
        ),
    ] = None,
    sequences: Annotated[
        int,
        typer.Option(help="Requests, or with --shape sequences, that are decoded together."),
    ] = 1,
    predicted: Annotated[
        int | None,
        typer.Option(
            help="With --prediction: of --sequences, requests that have one; what the others lose "
            "is told.",
            show_default="all",
        ),
    ] = None,
    context: o.DecodeFrom = None,
    busy: o.Busy = 0,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    adapter: o.Adapter = None,
    accept_field: o.AcceptField = None,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time to first token and decode speed of one request, in this process.

    Tokens are drafted only in the rows that say so.
    """
    from soloist.bench import decode as bench_decode
    from soloist.bench import shape as shapes
    from soloist.cli import tables
    from soloist.engine import EngineConfig
    from soloist.weights.choice import Rounding

    checked = o.checked_precision(precision)
    layers, head = o.checked_weights(weights), o.checked_head_weights(head_weights)
    _check_shape(shape, model, against, adapter, context)
    looks_up = o.speculates(speculate)
    if shape is not None and (prediction or looks_up):
        option, given = ("--prediction", "on") if prediction else ("--speculate", speculate)
        raise SettingError(option, given, "only without --shape")
    if shape is not None and beside:
        raise SettingError("--beside", beside[0], "only without --shape")
    if shape is not None and text is not None:
        raise SettingError("--text", text, "only without --shape, whose prompts are random")
    if predicted is not None and shape is not None:
        raise SettingError("--predicted", predicted, "only without --shape")
    if wrong and not prediction:
        raise SettingError("--wrong", wrong, "only with --prediction")
    if temperature is None:
        temperature = float(prediction or looks_up)
    accepted = o.accepted_fields(accept_field, shape)
    known = results.read_baseline(baseline, threshold)
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
                rounding=Rounding(layers, head),
                kv=o.checked_kv(kv),
                temperature=temperature,
            )
        )
    else:
        asked = EngineConfig(
            model or o.DEFAULT_MODEL, device, checked, gpus=o.parsed_gpus(gpus),
            weights=layers, head_weights=head, accepted_fields=accepted, adapter=adapter,
            kv=o.checked_kv(kv),
        )  # fmt: skip
        plan = bench_decode.Plan(
            asked, prompt_tokens, new_tokens, runs, against, busy, columns,
            looks_up=looks_up, wrong=wrong if prediction else None, temperature=temperature,
            beside=tuple(beside or ()), text=text, sequences=sequences, predicted=predicted,
        )  # fmt: skip
        rows = bench_decode.measure(plan)
    results.show(rows, tables.show_decode, output, as_json=json)
    results.hold_against(known, rows)


def prefill(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(help="Length of the prompt; may be repeated.", show_default="256"),
    ] = None,
    runs: o.Runs = 5,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="cold: nothing is cached; warm: the prompt came before; both; offloaded: it came "
            "before, and the host's memory has it; or saved: a server before had it, and the files "
            "are in the system's cache (TMPDIR says where).",
            show_default="both",
        ),
    ] = None,
    kept: Annotated[
        list[int] | None,
        typer.Option(
            help="Instead of --prefix: so many first tokens of the prompt came before, and another "
            "text follows them in every run; may be repeated."
        ),
    ] = None,
    streams: Annotated[
        int,
        typer.Option(
            help="So many answers of other requests go on while the prompt is read; the row has "
            "the longest time between two of their tokens."
        ),
    ] = 0,
    busy: o.Busy = 0,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    packed_prompts: o.PackedPrompts = None,
    unpack_prompts: o.UnpackPrompts = False,
    eight_bit_prompts: o.EightBitPrompts = False,
    page_attention: Annotated[
        bool | None,
        typer.Option(
            "--page-attention/--no-page-attention",
            help="Attend to KV pages by a kernel of our own in every pass, or by a library after "
            "they were copied.",
            show_default="our own on Hopper GPUs, without --kv and lanes",
        ),
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            help="Which way the tokens behind a prompt's last chunk are read: prefill (a pass), "
            "decode (rounds of the decode kernel), or auto (by a rule of measured figures)."
        ),
    ] = "auto",
    accept_field: o.AcceptField = None,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Prefill: how fast prompts are read, until the first token, in this process.

    Cold, and warm: with the prompt's prefix in the prefix cache, as in a server.
    """
    from soloist.bench import prefill as bench_prefill
    from soloist.cli import tables
    from soloist.engine import EngineConfig
    from soloist.engine.tail_path import TAIL_PATHS

    checked = o.checked_precision(precision)
    layers, head = o.checked_weights(weights), o.checked_head_weights(head_weights)
    tail_path = o.chosen("--path", path, {name: name for name in TAIL_PATHS})
    _check_only_one(shape, model)
    if kept and prefix is not None:
        raise SettingError("--kept", f"{kept[0]} with --prefix {prefix}", "one of both options")
    known_prefixes = {**o.PREFIXES, "offloaded": ("offloaded",), "saved": ("saved",)}
    prefixes = o.chosen("--prefix", prefix or "both", known_prefixes)
    accepted = o.accepted_fields(accept_field, shape)
    known = results.read_baseline(baseline, threshold)
    asked = EngineConfig(
        model or o.DEFAULT_MODEL, device, checked, gpus=o.parsed_gpus(gpus),
        weights=layers, head_weights=head, accepted_fields=accepted,
        packed_prompts=packed_prompts, unpacks_prompts=unpack_prompts,
        eight_bit_prompts=eight_bit_prompts, page_attention=page_attention, tail_path=tail_path,
        kv=o.checked_kv(kv),
    )  # fmt: skip
    plan = bench_prefill.Plan(
        asked=asked,
        shape=shape,
        prompt_tokens=tuple(prompt_tokens or (256,)),
        runs=runs,
        prefixes=prefixes,
        num_busy=busy,
        kept_tokens=tuple(kept or ()),
        num_streams=streams,
    )
    rows = bench_prefill.measure(plan)
    results.show(rows, tables.show_prefill, output, as_json=json)
    results.hold_against(known, rows)


def startup(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    runs: Annotated[int, typer.Option(help="Timed processes after one to warm up.")] = 3,
    kernel_cache: Annotated[
        str,
        typer.Option(
            help="warm: an earlier start compiled all kernels; compiled: `soloist compile` did; "
            "cold: none is compiled; both: warm and cold."
        ),
    ] = "both",
    serve: Annotated[
        bool, typer.Option("--serve", help="Time soloist serve, to the first text of a chat.")
    ] = False,
    context: o.Context = None,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    accept_field: o.AcceptField = None,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time from starting `soloist run` to its first token, with and without compiled kernels."""
    from soloist.bench import startup as bench_startup
    from soloist.cli import tables

    checked = o.checked_precision(precision)
    _check_only_one(shape, model)
    known = results.read_baseline(baseline, threshold)
    plan = bench_startup.Plan(
        model or o.DEFAULT_MODEL, shape, device, checked, runs, o.parsed_gpus(gpus),
        o.chosen("--kernel-cache", kernel_cache, _KERNEL_CACHES),
        o.accepted_fields(accept_field, shape), serve, context,
    )  # fmt: skip
    rows = bench_startup.measure(plan)
    results.show(rows, tables.show_startup, output, as_json=json)
    results.hold_against(known, rows)


def accuracy(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file; default: Python source code, or random tokens with --shape."),
    ] = None,
    positions: Annotated[int, typer.Option(help="Tokens of the text to read.")] = 512,
    against: Annotated[
        str | None,
        typer.Option(
            help="transformers: also compare its logits with fp32. unquantised: also compare "
            "Soloist's with fp32 on the weights before --weights and --head-weights rounded them."
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(help="Also run so many equal launches of 64 tokens and compare their bits."),
    ] = 0,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts",
            help="Also measure how prompts are read: each beginning of the text by a pass of its "
            "own, of up to 2,048 positions (on the decode kernel only).",
        ),
    ] = False,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    packed_prompts: o.PackedPrompts = None,
    eight_bit_prompts: o.EightBitPrompts = False,
    accept_field: o.AcceptField = None,
    output: o.Output = None,
    json: o.Json = False,
) -> None:
    """How far 16-bit logits are from fp32 arithmetic, at each position of a given text.

    With --kv, --precision fp32 too: then the KV cache alone differs, and the NLL is also told by
    position. On the decode kernel, also checks that batching and separate launches change no bit.
    """
    from soloist.bench import accuracy as bench_accuracy
    from soloist.cli import tables
    from soloist.weights.choice import Rounding

    checked = o.checked_precision(precision)
    layers, head = o.checked_weights(weights), o.checked_head_weights(head_weights)
    _check_only_one(shape, model)
    plan = bench_accuracy.Plan(
        model=model or o.DEFAULT_MODEL,
        shape=shape,
        text=text,
        positions=positions,
        against=against,
        repeats=repeats,
        device=device,
        precision=checked,
        gpus=o.parsed_gpus(gpus),
        rounding=Rounding(layers, head),
        kv=o.checked_kv(kv),
        accepted_fields=o.accepted_fields(accept_field, shape),
        prompts=prompts,
        packed_prompts=packed_prompts,
        eight_bit_prompts=eight_bit_prompts,
    )
    rows = bench_accuracy.measure(plan)
    results.show(rows, tables.show_accuracy, output, as_json=json)


def bandwidth(
    device: o.Device = "auto",
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Read bandwidth of the memory, as the other benches measure it for MBU."""
    from soloist.bench import bandwidth as bench_bandwidth
    from soloist.cli import tables

    known = results.read_baseline(baseline, threshold)
    row = bench_bandwidth.measure(device)
    results.show([row], tables.show_bandwidth, output, as_json=json)
    results.hold_against(known, [row])


def _check_shape(
    shape: Path | None,
    model: str | None,
    against: str | None,
    adapter: str | None,
    context: int | None,
) -> None:
    """Options of `bench decode` that go with --shape, and those that do not.

    Raises:
        SettingError: one is there that would have no effect.
    """
    if shape is None:
        if context is not None:
            raise SettingError("--context", context, "only with --shape", "add --shape config.json")
        return
    for name, unused in (("MODEL", model), ("--against", against), ("--adapter", adapter)):
        if unused is not None:
            raise SettingError(name, unused, "only without --shape, which uses random weights")


def _check_only_one(shape: Path | None, model: str | None) -> None:
    """A shape or a model.

    Raises:
        SettingError: both are there.
    """
    if shape is not None and model is not None:
        raise SettingError("MODEL", model, "only without --shape, which uses random weights")
