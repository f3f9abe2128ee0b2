"""`modelopt`: NVIDIA's Model Optimizer, in config.json or a file of its own."""

from soloist.model.quantization.fields import CACHE, QuantizationFields
from soloist.model.quantization.names import by_wildcards
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes

HF_QUANT_CONFIG = "hf_quant_config.json"
_ROWS_SHARING = {"FP8": 0, "FP8_PER_CHANNEL_PER_TOKEN": 1}


def read(fields: QuantizationFields) -> Method:
    """One algorithm for all matrices that are not excluded."""
    if (nested := fields.inner("quantization")) is not None:
        fields.refuse_rest()
        fields = nested
    fields.ignore(*CACHE)
    fields.ignore("config_groups")  # repeats what the algorithm's name says
    algorithm = fields.choice("quant_algo", tuple(_ROWS_SHARING))
    is_listed = by_wildcards(fields, "exclude_modules")
    is_ignored = by_wildcards(fields, "ignore")
    fields.refuse_rest()
    scheme = Scheme(f"modelopt {algorithm}", Layout.BYTES, Codes.FP8, rows=_ROWS_SHARING[algorithm])

    def of(module: str) -> tuple[Scheme | None, ...]:
        return (None,) if is_listed(module) or is_ignored(module) else (scheme,)

    return of
