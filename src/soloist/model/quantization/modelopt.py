"""`modelopt`: NVIDIA's Model Optimizer, in config.json or a file of its own."""

from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import by_wildcards
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes

HF_QUANT_CONFIG = "hf_quant_config.json"
_ROWS_SHARING = {"FP8": 0, "FP8_PER_CHANNEL_PER_TOKEN": 1}


def read(fields: QuantizationFields) -> Method:
    """One algorithm for all matrices that are not excluded."""
    if (nested := fields.inner("quantization")) is not None:
        fields.ignore("quant_method", "producer")
        fields.refuse_rest(frozenset())
        fields = nested
    # Keys and values stay in 16 bits, which loses nothing that a file with 8-bit ones had. Groups
    # repeat what the algorithm's name says.
    fields.ignore("quant_method", "producer", "kv_cache_quant_algo", "kv_cache_scheme")
    fields.ignore("config_groups", "version", "exclude_modules", "ignore")
    algorithm = fields.choice("quant_algo", tuple(_ROWS_SHARING))
    is_listed = by_wildcards(fields, "exclude_modules")
    is_ignored = by_wildcards(fields, "ignore")
    fields.refuse_rest(frozenset())
    scheme = Scheme(f"modelopt {algorithm}", Layout.BYTES, Codes.FP8, rows=_ROWS_SHARING[algorithm])

    def of(module: str) -> tuple[Scheme | None, ...]:
        return (None,) if is_listed(module) or is_ignored(module) else (scheme,)

    return Method(fields.family, of)
