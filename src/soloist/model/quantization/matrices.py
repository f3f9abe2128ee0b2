"""Which tensors of a checkpoint stand for a matrix, as its configuration and its files say it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import Any

from soloist.errors import QuantizationMismatch, WrongShape
from soloist.model.dtype import Dtype
from soloist.model.quantization.column_order import CONSECUTIVE, column_order
from soloist.model.quantization.scheme import Layout, Method, Part, Role, Scheme, is_router
from soloist.model.quantized import Quantized, widest
from soloist.model.stored import PLAIN, StoredTensor
from soloist.model.tensors import Source, TensorSpec

# What was found out about activations and the KV cache, which are in 16 bits here.
IGNORED = (
    r".*\.(input|output|activation|[kqv]|prob|kv_cache)_scale",
    r".*\.(input|output|[kqv])_zero_point",
    r".*\.input_scale_ub",
)
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantised matrix on disk.

    Attributes:
        source: what it stands for.
        scheme: how it is stored.
        tensors: by what each is for.
        quantized: what comes out of them.
    """

    source: Source
    scheme: Scheme
    tensors: Mapping[Role, StoredTensor]
    quantized: Quantized

    @property
    def rows(self) -> int:
        """N."""
        return self.source.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.source.shape[1]

    @property
    def module(self) -> str:
        """Whose matrix it is."""
        return self.source.name.removesuffix(_WEIGHT)

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a configuration says of modules, and the tensors that there are.

    Attributes:
        method: of the configuration.
        tensors: of the checkpoint, by name.
        read: the values of a small tensor, as a numpy array.
        embeds: the embedding may be quantised as well.
    """

    method: Method
    tensors: Mapping[str, StoredTensor]
    read: Callable[[StoredTensor], Any]
    embeds: bool = False

    def covers(self, spec: TensorSpec) -> bool:
        """Whether it is a matrix that may be quantised."""
        return may_be_quantised(spec, embeds=self.embeds)

    def stored(self, spec: TensorSpec) -> tuple[StoredMatrix | None, ...]:
        """How each source of a tensor is stored; None for one that stands for itself.

        Raises:
            CheckpointError: files and configuration disagree.
        """
        return tuple(self._stored(source) if self.covers(spec) else None for source in spec.sources)

    def column_order(self, matrix: StoredMatrix) -> bytes | None:
        """As of `column_order`, of a matrix that may have one.

        Raises:
            TruncatedFile: the file cannot be read.
        """
        groups = matrix.tensors.get(Role.GROUPS)
        if groups is None or not matrix.scheme.reordered or _num_groups(matrix) == 1:
            return CONSECUTIVE
        return column_order(self.read(groups), matrix.scheme.group)

    def sorted_columns(self, matrix: StoredMatrix) -> Any:  # noqa: ANN401 - numpy is not imported
        """Columns [K] of a matrix with an order, sorted by group, as numpy integers."""
        return self.read(matrix.tensors[Role.GROUPS]).argsort(kind="stable")

    def missing(self, spec: TensorSpec) -> list[str]:
        """Names of tensors that should be there."""
        names: list[str] = []
        for source in spec.sources:
            if self.covers(spec):
                names += self._missing(source)
            elif source.name not in self.tensors:
                names.append(source.name)
        return names

    def _missing(self, source: Source) -> list[str]:
        module, allowed = self._allowed(source)
        if self._choose(source, module, allowed) is not None:
            return []
        if any(self._held(module, scheme, source) for scheme in allowed if scheme is not None):
            return min((self._absent(module, s, source) for s in allowed if s is not None), key=len)
        if source.name in self.tensors or self._any_of(module):
            return []  # stored in another way, which `stored` says
        return [source.name if allowed[0] is None else f"{module}.{_codes(allowed[0], source)}"]

    def _stored(self, source: Source) -> StoredMatrix | None:
        module, allowed = self._allowed(source)
        chosen = self._choose(source, module, allowed)
        if chosen is None:
            held = self._any_of(module) or ["nothing"]
            wanted = " or ".join(_described(scheme, source) for scheme in allowed)
            raise QuantizationMismatch(module, ", ".join(held[:4]), wanted)
        scheme = chosen[0]
        return None if scheme is None else self._checked(source, module, scheme)

    def _allowed(self, source: Source) -> tuple[str, tuple[Scheme | None, ...]]:
        module = source.name.removesuffix(_WEIGHT)
        allowed = self.method(module)
        if is_router(module) and None not in allowed:
            allowed = (*allowed, None)
        return module, allowed

    def _choose(
        self, source: Source, module: str, allowed: tuple[Scheme | None, ...]
    ) -> tuple[Scheme | None] | None:
        """The first way in which everything is there, in a tuple of its own; None if none is."""
        plain = self.tensors.get(source.name)
        is_plain = plain is not None and plain.dtype in PLAIN
        for scheme in allowed:
            if is_plain if scheme is None else self._is_complete(module, scheme, source):
                return (scheme,)
        return None

    def _is_complete(self, module: str, scheme: Scheme, source: Source) -> bool:
        plain = self.tensors.get(f"{module}{_WEIGHT}")
        if plain is not None and plain.dtype in PLAIN:
            # A swapped pair of names keeps its error about shapes.
            return scheme.layout is Layout.BYTES and plain.shape != source.shape
        return not self._absent(module, scheme, source)

    def _absent(self, module: str, scheme: Scheme, source: Source) -> list[str]:
        parts = scheme.parts(_sizes(source), module).values()
        names = (f"{module}.{part.suffix}" for part in parts if part.needed)
        return [name for name in names if name not in self.tensors]

    def _held(self, module: str, scheme: Scheme, source: Source) -> bool:
        """Its codes are there, so that the others should be."""
        found = self.tensors.get(f"{module}.{_codes(scheme, source)}")
        return found is not None and found.dtype not in PLAIN

    def _any_of(self, module: str) -> list[str]:
        return [
            f"{name.removeprefix(module + '.')} in {tensor.dtype}"
            for name, tensor in sorted(self.tensors.items())
            if name.startswith(f"{module}.") and not name.endswith(".bias")
        ]

    def _checked(self, source: Source, module: str, scheme: Scheme) -> StoredMatrix:
        found: dict[Role, StoredTensor] = {}
        for role, part in scheme.parts(_sizes(source), module).items():
            tensor = self.tensors.get(f"{module}.{part.suffix}")
            if tensor is not None:
                _require(tensor, part)
                found[role] = tensor
        scales = scheme.inner_scales or PLAIN.get(found[Role.SCALES].dtype, Dtype.FP32)
        return StoredMatrix(source, scheme, found, meaning(scheme, scales))


def may_be_quantised(spec: TensorSpec, *, embeds: bool = False) -> bool:
    """A matrix that is multiplied with; an embedding only where `embeds` says that one may be."""
    return (embeds or spec.name != "embedding") and len(spec.sources[0].shape) == 2


def meaning(scheme: Scheme, scales: Dtype) -> Quantized:
    """What a matrix of a scheme is read into."""
    return Quantized(
        codes=scheme.codes,
        group=scheme.group,
        scale_dtype=scales,
        has_zeros=not scheme.symmetric,
        has_offsets=scheme.has_offsets,
        super_block=scheme.super_block,
        scale_rows=scheme.rows or 1,
    )


def joined(quantization: Quantization | None, spec: TensorSpec) -> Quantized | None:
    """What the whole tensor is once its sources are put below each other.

    None where they cannot be one: a part is in 16 bits, or of a kind that no `widest` one holds, or
    in another order of columns, or in an order that cannot be kept.
    """
    if quantization is None or spec.axis != 0:
        return None
    matrices: list[StoredMatrix] = []
    for matrix in quantization.stored(spec):
        if matrix is None:
            return None
        matrices.append(matrix)
    kinds = {replace(matrix.quantized, scale_rows=1) for matrix in matrices}
    orders = {quantization.column_order(matrix) for matrix in matrices}
    kind = widest(kinds)
    if kind is None or len(orders) > 1 or None in orders:
        return None
    permuted = orders != {CONSECUTIVE}
    return replace(kind, scale_rows=_rows_sharing(matrices), permuted=permuted)


def describe(quantization: Quantization, specs: Iterable[TensorSpec]) -> str:
    """Formats for people: 'fp8 (fp8: blocks of 128 × 128), 14 of 15 matrices'."""
    counts: dict[str, int] = {}
    total = 0
    for spec in specs:
        if quantization.covers(spec):
            for matrix in quantization.stored(spec):
                total += 1
                if matrix is not None:
                    words = in_words(matrix.scheme)
                    counts[words] = counts.get(words, 0) + 1
    told = "; ".join(f"{words}, {count} of {total} matrices" for words, count in counts.items())
    return told or "nothing is quantised"


def in_words(scheme: Scheme) -> str:
    """What people call it: 'int4 (gptq: groups of 128 and zeros)'."""
    if scheme.rows == 0:
        shared = "one scale a matrix"
    elif scheme.rows > 1:
        shared = f"blocks of {scheme.rows} × {scheme.group}"
    elif scheme.group:
        shared = f"groups of {scheme.group}"
    else:
        shared = "one scale a row"
    zeros = " and offsets" if scheme.has_offsets else "" if scheme.symmetric else " and zeros"
    return f"{scheme.codes.value} ({scheme.name}: {shared}{zeros})"


def _num_groups(matrix: StoredMatrix) -> int:
    return matrix.quantized.groups(matrix.columns)


def _rows_sharing(matrices: list[StoredMatrix]) -> int:
    """Rows of the whole that share scales wherever one counts off so many."""
    starts, start = [], 0
    for matrix in matrices:
        starts.append(start)
        start += matrix.rows
    shared = {matrix.quantized.scale_rows for matrix in matrices}
    return reduce(gcd, [*shared, *starts])


def _sizes(source: Source) -> tuple[int, int]:
    rows, columns = source.shape
    return rows, columns


def _codes(scheme: Scheme, source: Source) -> str:
    return scheme.parts(_sizes(source), source.name)[Role.CODES].suffix


def _described(scheme: Scheme | None, source: Source) -> str:
    if scheme is None:
        return "weight in 16 bits"
    return f"{_codes(scheme, source)} of {in_words(scheme)}"


def _require(tensor: StoredTensor, part: Part) -> None:
    if tensor.shape not in part.shapes:
        raise WrongShape(tensor.shown, tensor.shape, part.shapes[0])
    if tensor.dtype not in part.dtypes:
        raise QuantizationMismatch(tensor.shown, tensor.dtype, " or ".join(part.dtypes))
