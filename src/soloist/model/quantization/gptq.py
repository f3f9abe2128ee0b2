"""`gptq`, as AutoGPTQ and GPTQModel write it: modules that have codes are quantised."""

from collections.abc import Callable

from soloist.errors import MissingField
from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import compiled
from soloist.model.quantization.scheme import Layout, Method, Scheme, is_head
from soloist.model.quantized import Codes
from soloist.model.reading import REQUIRED

_FORMATS = ("gptq", "gptq_v2")

# Before a pattern of `dynamic`: what matches stays in 16 bits.
_LEFT_OUT = "-:"


def read(fields: QuantizationFields) -> Method:
    """4 or 8 bits, and `dynamic` for modules that differ."""
    fields.one_of("is_marlin_format", (False,), default=False)
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.one_of("data_type", ("int",), "int")
    stored = fields.one_of("checkpoint_format", _FORMATS, None)
    stored = fields.one_of("format", _FORMATS if stored is None else (stored,), stored or "gptq")
    usual = read_scheme(fields, None, zero_offset=1 if stored == "gptq" else 0)
    dynamic = [
        (_matcher(fields, pattern), _read_override(usual, pattern, overrides))
        for pattern, overrides in fields.groups("dynamic").items()
    ]
    has_head = fields.flag("lm_head", None)
    fields.refuse_rest()

    def of(module: str) -> tuple[Scheme | None, ...]:
        # The first pattern that matches decides; of others the tensors do.
        for matches, scheme in dynamic:
            if matches(module):
                return (scheme,)
        if is_head(module) and has_head is not None:
            return (usual,) if has_head else (None,)
        return (usual, None)

    return of


def read_scheme(fields: QuantizationFields, usual: Scheme | None, *, zero_offset: int) -> Scheme:
    """A scheme of bits, group_size, sym and desc_act; what is absent is as in `usual`.

    Raises:
        ConfigError: a field is missing, or not one that is read.
    """
    bits = fields.one_of("bits", (4, 8), None if usual is None else usual.codes.bits)
    if bits is None:
        raise MissingField(fields.file, fields.path("bits"), "4 or 8")
    size = fields.integer("group_size", (usual.group or -1) if usual else REQUIRED, minimum=-1)
    if size == 0:
        raise fields.unsupported("group_size", size, "-1, or above 0")
    return Scheme(
        name=fields.family,
        layout=Layout.GPTQ,
        codes=Codes.INT4 if bits == 4 else Codes.INT8,
        group=max(size, 0),
        # Zeros are there in any case; symmetric are those that say nothing.
        symmetric=fields.flag("sym", default=usual.symmetric if usual else False),
        reordered=fields.flag("desc_act", default=usual.reordered if usual else False),
        zero_offset=zero_offset,
    )


def _read_override(usual: Scheme, pattern: str, fields: QuantizationFields) -> Scheme | None:
    if pattern.startswith(_LEFT_OUT):
        return None
    scheme = read_scheme(fields, usual, zero_offset=usual.zero_offset)
    fields.refuse_rest()
    return scheme


def _matcher(fields: QuantizationFields, pattern: str) -> Callable[[str], bool]:
    found = compiled(fields, "dynamic", pattern.removeprefix(_LEFT_OUT).removeprefix("+:"))
    return lambda module: found.match(module) is not None
