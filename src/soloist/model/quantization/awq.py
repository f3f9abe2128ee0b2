"""`awq`, in the order that its gemm kernels read."""

from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import by_substring, by_transformers
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes

_HEAD = "lm_head"
_VERSIONS = ("gemm", "GEMM")


def read(fields: QuantizationFields) -> Method:
    """4 bits; modules that are not listed have codes, but for the head, of which tensors decide."""
    # How it was found, and which kernels others run.
    fields.ignore("quant_method", "backend", "exllama_config", "do_fuse", "fuse_max_seq_len")
    fields.ignore("modules_to_fuse", "meta", "method", "lm_head", "pack_dtype", "desc_act")
    for name in ("version", "format", "checkpoint_format"):
        fields.one_of(name, _VERSIONS, "gemm")
    for name in ("bits", "w_bit"):
        fields.one_of(name, (4,), 4)
    size = fields.integer("group_size", None, minimum=-1)
    size = fields.integer("q_group_size", None, minimum=-1) if size is None else size
    has_zeros = fields.flag("zero_point", fields.flag("sym", default=False) is not True)
    is_listed = by_transformers(fields, "modules_to_not_convert")
    is_part_listed = by_substring(fields, "modules_to_not_convert")
    fields.ignore("q_group_size")
    fields.refuse_rest(frozenset())
    scheme = gemm(fields, 128 if size is None else size, symmetric=not has_zeros)

    def of(module: str) -> tuple[Scheme | None, ...]:
        if is_listed(module) or is_part_listed(module):
            return (None,)
        return (scheme, None) if module == _HEAD else (scheme,)

    return Method(fields.family, of)


def gemm(fields: QuantizationFields, size: int, *, symmetric: bool) -> Scheme:
    """The scheme for a `group_size`; -1 is one group."""
    if size == 0:
        raise fields.unsupported("group_size", size, "-1, or above 0")
    return Scheme("awq", Layout.AWQ, Codes.INT4, group=max(size, 0), symmetric=symmetric)
