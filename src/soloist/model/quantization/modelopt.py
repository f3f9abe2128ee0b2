"""`modelopt`: NVIDIA's Model Optimizer, in config.json or a file of its own."""

from collections.abc import Mapping
from typing import Any

from soloist.model.quantization.fields import CACHE, QuantizationFields
from soloist.model.quantization.names import by_wildcards
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes

_ROWS_SHARING = {"FP8": 0, "FP8_PER_CHANNEL_PER_TOKEN": 1}


def algorithm(values: Mapping[str, Any]) -> object:
    """What a configuration calls the algorithm, there or one object further inside."""
    nested = values.get("quantization")
    return (nested if isinstance(nested, dict) else values).get("quant_algo")


def read(fields: QuantizationFields) -> Method:
    """One algorithm for all matrices that are not excluded."""
    if (nested := fields.inner("quantization")) is not None:
        fields.refuse_rest()
        fields = nested
    fields.ignore(*CACHE)
    fields.ignore("config_groups")  # repeats what the algorithm's name says
    name = fields.choice("quant_algo", tuple(_ROWS_SHARING))
    is_listed = by_wildcards(fields, "exclude_modules")
    is_ignored = by_wildcards(fields, "ignore")
    fields.refuse_rest()
    scheme = Scheme(f"modelopt {name}", Layout.BYTES, Codes.FP8, rows=_ROWS_SHARING[name])

    def of(module: str) -> tuple[Scheme | None, ...]:
        return (None,) if is_listed(module) or is_ignored(module) else (scheme,)

    return of
