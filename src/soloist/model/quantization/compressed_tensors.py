"""`compressed-tensors`: groups of modules, each with its scheme; llm-compressor writes it."""

from dataclasses import dataclass

from soloist.errors import MissingField, WrongType
from soloist.model.quantization.fields import CACHE, QuantizationFields
from soloist.model.quantization.names import IsListed, by_compressed_tensors, matcher
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes

_MIXED = "mixed-precision"
_PACKED = "pack-quantized"
_KINDS = {
    _PACKED: ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("float", "int"),
    "int-quantized": ("int",),
}
_FORMATS = tuple(_KINDS)
# Without zeros that are left out they say nothing.
_OF_SPARSITY = (
    *("global_sparsity", "ignore", "registry_requires_subclass"),
    *("sparsity_structure", "targets"),
)


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules with one scheme: None leaves them in 16 bits."""

    targets: tuple[str, ...]
    matches: IsListed
    scheme: Scheme | None

    def rank(self, module: str) -> int:
        """How closely its targets name a module: 2 a name, 1 a pattern, 0 the class, -1 not."""
        if module in self.targets:
            return 2
        if self.matches(module):
            return 1
        return 0 if "Linear" in self.targets else -1


def read(fields: QuantizationFields) -> Method:
    """Groups, what they leave out, and that nothing else happens to the weights."""
    fields.ignore(*CACHE)
    # Early files call themselves frozen; whether weights are compressed, their tensors say.
    fields.one_of("quantization_status", ("compressed", "frozen"), None)
    _require_nothing_else(fields)
    fallback = fields.one_of("format", (*_FORMATS, _MIXED), None)
    groups = [_read_group(group, fallback) for group in fields.groups("config_groups").values()]
    if not groups:
        raise MissingField(fields.file, fields.path("config_groups"), "at least one group")
    is_ignored = by_compressed_tensors(fields, "ignore")
    fields.refuse_rest()

    def schemes(module: str) -> tuple[Scheme | None, ...]:
        found = max(groups, key=lambda group: group.rank(module))
        if is_ignored(module) or found.rank(module) < 0:
            return (None,)
        return (found.scheme,)

    return schemes


def _require_nothing_else(fields: QuantizationFields) -> None:
    """No rotations, and no zeros left out."""
    sparsity = fields.inner("sparsity_config")
    if sparsity is not None:
        sparsity.one_of("format", ("dense",), "dense")
        sparsity.ignore(*_OF_SPARSITY)
        sparsity.refuse_rest()
    transforms = fields.inner("transform_config")
    if transforms is not None:
        if transforms.value("config_groups"):
            raise fields.unsupported("transform_config", transforms.value("config_groups"), "{}")
        transforms.refuse_rest()


def _read_group(fields: QuantizationFields, fallback: str | None) -> _Group:
    targets = tuple(fields.strings("targets"))
    stored = fields.one_of("format", _FORMATS, None)
    stored = fallback if stored is None else stored
    weights = fields.inner("weights")
    scheme = None
    if weights is not None:
        if stored is None or stored == _MIXED:
            raise MissingField(fields.file, fields.path("format"), f"one of {', '.join(_FORMATS)}")
        scheme = _read_weights(weights, stored)
    fields.refuse_rest()
    named = tuple(target for target in targets if target != "Linear")
    return _Group(targets, matcher(fields, "targets", named), scheme)


def _read_weights(fields: QuantizationFields, stored: str) -> Scheme:
    fields.one_of("dynamic", (False,), default=False)
    kind = fields.one_of("type", ("int", "float"), "int")
    scheme = _read_codes(fields, stored, kind)
    fields.refuse_rest()
    return scheme


def _read_codes(fields: QuantizationFields, stored: str, kind: str) -> Scheme:
    is_packed = stored == _PACKED
    bits = fields.one_of("num_bits", (4, 8) if is_packed else (8,), 8)
    if kind not in _KINDS[stored]:
        raise fields.unsupported("type", kind, f"{_KINDS[stored][0]} in {stored}")
    codes = Codes.FP8 if kind == "float" else Codes.INT4 if bits == 4 else Codes.INT8
    order = fields.one_of("actorder", ("weight", "static", "group", "dynamic", False), None)
    group, rows = _read_strategy(fields, is_packed=is_packed)
    return Scheme(
        name=stored,
        layout=Layout.WORDS if is_packed else Layout.BYTES,
        codes=codes,
        group=group,
        rows=rows,
        symmetric=fields.flag("symmetric", default=True),
        reordered=is_packed and order in ("group", "dynamic"),
    )


def _read_strategy(fields: QuantizationFields, *, is_packed: bool) -> tuple[int, int]:
    """(columns, rows) that share a scale, 0 for all of them."""
    size = fields.integer("group_size", None, minimum=-1)
    implied = "tensor" if size is None else "group" if size > 0 else "channel"
    allowed = ("tensor", "channel", "group") + (() if is_packed else ("block",))
    strategy = fields.one_of("strategy", allowed, implied)
    if strategy == "block":
        rows, columns = fields.pair("block_structure")
    elif fields.value("block_structure") is not None:
        raise fields.unsupported(
            "block_structure", fields.value("block_structure"), f"absent in strategy {strategy}"
        )
    if size is not None and size > 0 and strategy != "group":
        raise fields.unsupported("group_size", size, f"absent in strategy {strategy}")
    if strategy == "block":
        return columns, rows
    if strategy == "group":
        if size is None or size < 1:
            raise WrongType(fields.file, fields.path("group_size"), size, "a whole number above 0")
        return size, 1
    return 0, 1 if strategy == "channel" else 0
