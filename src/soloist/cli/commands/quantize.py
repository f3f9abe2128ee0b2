"""`soloist quantize`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from soloist.cli import options as o
from soloist.errors import SettingError
from soloist.model.quantized import AT_LOAD, GROUPS, Codes

_GROUPS = {str(group): group for group in GROUPS}


def quantize(
    model: o.Model = "etude",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new or empty folder.")
    ] = None,
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Columns that share a scale of int4: 128, 64 or 32; default: 128. A matrix whose "
            "rows it does not divide takes the next smaller one."
        ),
    ] = None,
    revision: o.Revision = None,
    adapter: o.Adapter = None,
    accept_field: o.AcceptField = None,
    json: o.Json = False,
) -> None:
    """Write a copy of a 16-bit model with quantised weights, in the format compressed-tensors.

    vLLM and transformers read it. Numbers are rounded to the nearest code, without calibration.
    Embedding, norms, biases and, without --head-weights, the LM head keep their bytes. With
    --adapter, the adapter is merged first.

    --head-weights unties a tied head: it becomes a matrix beside the embedding. Not every engine
    reads a quantised head; docs/models.md says more.
    """
    from soloist.cli import quantizing
    from soloist.weights.export_plan import Asked

    layers, head = o.checked_weights(weights), o.checked_head_weights(head_weights)
    columns = GROUPS[0] if group is None else o.chosen("--group", group, _GROUPS)
    if layers is None:
        raise SettingError("--weights", "missing", ", ".join(AT_LOAD))
    if output is None:
        raise SettingError("--output", "missing", "a new or empty folder")
    if group is not None and Codes.INT4 not in (layers, head):
        raise SettingError("--group", group, "only with int4: in int8 and fp8 a row has one scale")
    asked = Asked(layers, head, columns, o.accepted_fields(accept_field))
    quantizing.write(model, revision, asked, output, adapter, as_json=json)
