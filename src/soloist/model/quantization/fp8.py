"""`fp8`, as Qwen, DeepSeek and AutoFP8 write it, and `fbgemm_fp8`, as Meta did."""

from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import by_transformers
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes

# Only the head may be in 16 bits without being listed.
_HEAD = "lm_head"


def read(fields: QuantizationFields) -> Method:
    """Blocks of a matrix share a scale, by which codes are multiplied whatever its name says."""
    fields.ignore("quant_method", "activation_scheme", "kv_cache_scheme", "dequantize")
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), None)
    fields.one_of("scale_fmt", ("float", "ue8m0"), None)  # the tensors say it too
    fields.one_of("expert_dtype", ("fp8",), None)
    if fields.strings("modules_to_convert"):
        raise fields.unsupported(
            "modules_to_convert", fields.strings("modules_to_convert"), "an empty list"
        )
    given = "modules_to_not_convert" if "modules_to_not_convert" in fields else "ignored_layers"
    is_listed = by_transformers(fields, given)
    fields.ignore("modules_to_not_convert", "ignored_layers")
    schemes = _schemes(fields)
    fields.refuse_rest(frozenset())

    def of(module: str) -> tuple[Scheme | None, ...]:
        if is_listed(module):
            return (None,)
        return (*schemes, None) if module == _HEAD else schemes

    return Method(fields.family, of)


def _schemes(fields: QuantizationFields) -> tuple[Scheme, ...]:
    block = fields.value("weight_block_size")
    if block is not None:
        rows, columns = fields.pair("weight_block_size")
        return (_scheme(columns, rows, "weight_scale_inv"),)
    inverse = _scheme(0, 0, "weight_scale_inv")
    if fields.names("weight_block_size"):
        return (inverse,)
    # Without the field libraries take blocks of 128; AutoFP8 left it out for one scale a matrix.
    return (_scheme(128, 128, "weight_scale_inv"), _scheme(0, 0, "weight_scale"))


def read_fbgemm(fields: QuantizationFields) -> Method:
    """Every row has a scale."""
    fields.ignore("quant_method", "activation_scale_ub")
    is_listed = by_transformers(fields, "modules_to_not_convert")
    fields.refuse_rest(frozenset())
    scheme = Scheme("fbgemm_fp8", Layout.BYTES, Codes.FP8)

    def of(module: str) -> tuple[Scheme | None, ...]:
        if is_listed(module):
            return (None,)
        return (scheme, None) if module == _HEAD else (scheme,)

    return Method(fields.family, of)


def _scheme(group: int, rows: int, scales: str) -> Scheme:
    return Scheme("fp8", Layout.BYTES, Codes.FP8, group=group, rows=rows, scales=scales)
