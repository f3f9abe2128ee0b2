"""`awq`, in the order that its gemm kernels read."""

from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import by_substring, by_transformers
from soloist.model.quantization.scheme import Layout, Method, Scheme, all_but, is_router
from soloist.model.quantized import Codes

_VERSIONS = ("gemm", "GEMM")


def read(fields: QuantizationFields) -> Method:
    """4 bits; modules that are not listed have codes, but for the head, of which tensors decide."""
    fields.ignore("lm_head", "desc_act")
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.one_of("data_type", ("int",), "int")
    for name in ("version", "format", "checkpoint_format"):
        fields.one_of(name, _VERSIONS, "gemm")
    for name in ("bits", "w_bit"):
        fields.one_of(name, (4,), 4)
    size = _read_group_size(fields)
    # GPTQModel writes both names, and its reader lets zero_point decide.
    has_zeros = fields.flag("zero_point", fields.flag("sym", default=False) is not True)
    is_listed = by_transformers(fields, "modules_to_not_convert")
    # 'gate' is listed for routers: whether gate_proj was left out as well the tensors know.
    is_router_listed = by_substring(fields, "modules_to_not_convert", is_router)
    is_part_listed = by_substring(
        fields, "modules_to_not_convert", lambda name: not is_router(name)
    )
    fields.refuse_rest()
    scheme = Scheme("awq", Layout.AWQ, Codes.INT4, group=max(size, 0), symmetric=not has_zeros)
    of_listed = all_but(lambda module: is_listed(module) or is_part_listed(module), scheme)

    def of(module: str) -> tuple[Scheme | None, ...]:
        if is_router_listed(module) and not is_listed(module):
            return (scheme, None)
        return of_listed(module)

    return of


def _read_group_size(fields: QuantizationFields) -> int:
    """Under one of two names; -1 for all columns."""
    older = fields.integer("q_group_size", None, minimum=-1)
    size: int = fields.integer("group_size", 128 if older is None else older, minimum=-1)
    if older not in (None, size):
        raise fields.unsupported("q_group_size", older, f"{size}, as group_size says")
    if size == 0:
        raise fields.unsupported("group_size", size, "-1, or above 0")
    return size
