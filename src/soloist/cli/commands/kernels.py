"""`soloist compile`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from soloist.cli import options as o


def compile_(
    model: o.Model = "etude",
    arch: Annotated[
        str | None,
        typer.Option(
            help="Architecture of the GPU that the kernels are for, such as sm_90a for H100 and "
            "H200; default: this machine's GPU."
        ),
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option(
            help="Streaming multiprocessors of that GPU; default: those of a typical one of its "
            "architecture."
        ),
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="GPUs that will run the model together: 1, 2, 4 or 8.")
    ] = "1",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The kernel cache to fill; default: this user's, SOLOIST_CACHE."
        ),
    ] = None,
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    revision: o.Revision = None,
    accept_field: o.AcceptField = None,
    json: o.Json = False,
) -> None:
    """Compile a model's kernels ahead of its first start; no GPU is needed.

    A machine finds them where SOLOIST_CACHE names the folder, and compiles nothing. Give the
    options with which the model will run: --gpus, --precision, --weights, --head-weights and --kv
    make other kernels.
    """
    from soloist.cli import compiling
    from soloist.weights.choice import Rounding

    asked = compiling.Asked(
        model=model,
        revision=revision,
        arch=arch,
        num_sms=sms,
        ranks=compiling.checked_ranks(gpus),
        output=output,
        precision=o.checked_precision(precision),
        rounding=Rounding(o.checked_weights(weights), o.checked_head_weights(head_weights)),
        accepted_fields=o.accepted_fields(accept_field),
        kv=o.checked_kv(kv),
    )
    compiling.fill(asked, as_json=json)
