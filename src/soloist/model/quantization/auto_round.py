"""`auto-round`: the tensors of GPTQ or of AWQ, by `packing_format`."""

from collections.abc import Callable
from dataclasses import replace

from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.gptq import read_scheme
from soloist.model.quantization.names import compiled
from soloist.model.quantization.scheme import Layout, Method, Scheme

_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptqmodel")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_WIDEST = 8


def read(fields: QuantizationFields) -> Method:
    """Modules that have codes are quantised; `extra_config` says which differ."""
    packing = _read_packing(fields)
    fields.one_of("data_type", ("int",), "int")
    usual = _read_scheme(fields, None, packing)
    fields.ignore("modules_to_not_convert")  # which the tensors say as well
    extra = [
        (_matcher(fields, name), _read_extra(own, usual, packing))
        for name, own in fields.groups("extra_config").items()
    ]
    fields.refuse_rest()

    def of(module: str) -> tuple[Scheme | None, ...]:
        return next(((scheme,) for matches, scheme in extra if matches(module)), (usual, None))

    return of


def _read_packing(fields: QuantizationFields) -> str:
    """`packing_format`, which early files do not have; they name a kernel, and so a packing.

    Raises:
        UnsupportedQuantization: AutoRound's own packing, whose zeros are others.
    """
    packing = fields.one_of("packing_format", (*_GPTQ, *_AWQ), None)
    if packing is not None:
        return str(packing)
    backend = fields.value("backend")
    found = next((p for p in (*_GPTQ, *_AWQ) if str(backend or _GPTQ[0]).startswith(p)), None)
    if found is None:
        raise fields.unsupported("backend", backend, ", ".join((*_GPTQ, *_AWQ)))
    return found


def _read_extra(fields: QuantizationFields, usual: Scheme, packing: str) -> Scheme | None:
    bits = fields.integer("bits", usual.codes.bits)
    if bits > _WIDEST:
        return None
    fields.one_of("data_type", ("int",), "int")
    scheme = _read_scheme(fields, usual, packing)
    fields.refuse_rest()
    return scheme


def _read_scheme(fields: QuantizationFields, usual: Scheme | None, packing: str) -> Scheme:
    if packing in _GPTQ:
        return read_scheme(fields, usual, zero_offset=1)
    fields.one_of("bits", (4,), 4)
    scheme = read_scheme(fields, usual, zero_offset=0)
    return replace(scheme, layout=Layout.AWQ, reordered=False)


def _matcher(fields: QuantizationFields, name: str) -> Callable[[str], bool]:
    """A module's name, or a regular expression for it."""
    found = compiled(fields, "extra_config", name)
    return lambda module: module == name or found.fullmatch(module) is not None
