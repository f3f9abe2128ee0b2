"""`fp8`, as Qwen, DeepSeek and AutoFP8 write it, and `fbgemm_fp8`, as Meta did."""

from soloist.model.quantization.fields import CACHE, QuantizationFields
from soloist.model.quantization.names import by_transformers
from soloist.model.quantization.scheme import Layout, Method, Scheme, all_but
from soloist.model.quantized import Codes


def read(fields: QuantizationFields) -> Method:
    """Blocks of a matrix share a scale, by which codes are multiplied whatever its name says."""
    fields.ignore(*CACHE)
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
    fields.refuse_rest()
    return all_but(is_listed, *schemes)


def _schemes(fields: QuantizationFields) -> tuple[Scheme, ...]:
    if "weight_block_size" in fields:
        rows, columns = fields.pair("weight_block_size")
        return (_scheme(columns, rows, "weight_scale_inv"),)
    inverse = _scheme(0, 0, "weight_scale_inv")
    if fields.names("weight_block_size"):
        return (inverse,)
    # Without the field libraries take blocks of 128; AutoFP8 left it out for one scale a matrix.
    return (_scheme(128, 128, "weight_scale_inv"), _scheme(0, 0, "weight_scale"))


def read_fbgemm(fields: QuantizationFields) -> Method:
    """Every row has a scale."""
    is_listed = by_transformers(fields, "modules_to_not_convert")
    fields.refuse_rest()
    return all_but(is_listed, Scheme("fbgemm_fp8", Layout.BYTES, Codes.FP8))


def _scheme(group: int, rows: int, scales: str) -> Scheme:
    return Scheme("fp8", Layout.BYTES, Codes.FP8, group=group, rows=rows, scales=scales)
