"""An adapter in peft's form: its files, held against a model before anything is read. Pure.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. It holds two factors
for each matrix that it changes: B [out, r] and A [r, in] of what is added, scale · B · A. Modules
that were trained as a whole replace the model's. Only headers are read here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from soloist.errors import (
    AdapterMismatch,
    AdapterOnCodes,
    MissingFile,
    SettingError,
    UnsupportedAdapter,
    quoted,
)
from soloist.files import is_there
from soloist.model.checkpoint import Checkpoint, read_header
from soloist.model.folder import ADAPTER_WEIGHTS
from soloist.model.foreign import ADAPTER_FILE
from soloist.model.lora import Lora, ends_with, read_lora
from soloist.model.quantization.matrices import in_words
from soloist.model.stored import PLAIN, StoredTensor
from soloist.model.tensors import TensorSpec

# Before the names of modules, by peft: of the adapter, and of the model that it wraps.
_WRAPPED: Final = "base_model.model."

_A, _B = ".lora_A.weight", ".lora_B.weight"
_TABLE_A, _TABLE_B = ".lora_embedding_A", ".lora_embedding_B"
_LENGTHS, _UNCHANGED = ".lora_magnitude_vector", ".base_layer.weight"
_ENDS: Final = (_A, _B, _TABLE_A, _TABLE_B, _LENGTHS, _UNCHANGED)


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a matrix: scale · B · A.

    Attributes:
        a: A [r, in].
        b: B [out, r].
        scale: of the product.
        is_transposed: the product is that of the matrix' columns: it is an embedding's, whose
            factors peft keeps for [hidden, vocabulary].
        lengths: [out], of the sum's rows, which they get instead of their own: DoRA.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    is_transposed: bool = False
    lengths: StoredTensor | None = None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All of them."""
        return (self.a, self.b) if self.lengths is None else (self.a, self.b, self.lengths)


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one tensor of a model.

    Attributes:
        whole: comes in its place first.
        low_rank: is added to it.
    """

    whole: StoredTensor | None = None
    low_rank: LowRank | None = None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Of the adapter, all that this reads."""
        whole = () if self.whole is None else (self.whole,)
        return whole if self.low_rank is None else (*whole, *self.low_rank.tensors)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits a model: names, shapes and places, no data.

    Attributes:
        folder: of its files.
        changes: by the name of the model's tensor.
    """

    folder: Path
    changes: Mapping[str, Change]

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        """All of them."""
        return (tensor for change in self.changes.values() for tensor in change.tensors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that its factors have."""
        found = {c.low_rank.a.shape[0] for c in self.changes.values() if c.low_rank is not None}
        return tuple(sorted(found))


def open_adapter(folder: Path, checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> Adapter:
    """Hold an adapter's files against a model.

    Args:
        folder: of the adapter.
        checkpoint: the model's files, held against its configuration already.
        specs: the model's tensors.

    Raises:
        UnsupportedAdapter, ConfigError: its configuration asks for something else, or is damaged.
        CheckpointError: files are missing or cut off, contradict each other, or do not fit the
            model; or a matrix that they change is quantised.
        SettingError: the model's family has no matrices that can be adapted.
    """
    lora = read_lora(folder / ADAPTER_FILE)
    file = folder / ADAPTER_WEIGHTS
    if not is_there(file):
        found = sorted(path.name for path in folder.iterdir())
        raise MissingFile(str(folder), ADAPTER_WEIGHTS, found, _hint_for(found))
    matching = _Matching(lora, file, tuple(specs))
    changes = matching.changes({tensor.name: tensor for tensor in read_header(file)})
    _require_plain(folder, checkpoint, matching.specs, changes)
    return Adapter(folder, changes)


def _hint_for(found: Iterable[str]) -> str:
    if "adapter_model.bin" not in found:
        return "give the folder that peft's save_pretrained wrote"
    return (
        "adapter_model.bin is an older form; load the adapter once with the package peft and save "
        "it with save_pretrained, which writes safetensors"
    )


class _Matching:
    """An adapter's tensors beside a model's."""

    def __init__(self, lora: Lora, file: Path, specs: tuple[TensorSpec, ...]) -> None:
        self.specs = specs
        self._lora, self._file = lora, file
        self._shapes = {source.name: source.shape for spec in specs for source in spec.sources}
        self._in_layers = {s.name for spec in specs if spec.is_layer_matrix for s in spec.sources}
        self._tables = {s.name for spec in specs if spec.name == "embedding" for s in spec.sources}
        # Where a head is tied, the file of its model may lack it, but a module has its name.
        self._tied = {
            name
            for spec in specs
            for name in (*(s.name for s in spec.sources if spec.copies), *spec.copies)
        }
        heads = {s.name for spec in specs if spec.name == "head" for s in spec.sources}
        self._matrices = (*self._in_layers, *heads, *self._tables, *self._tied)
        self._modules = {_module(name) for name in self._matrices}
        self._covered = set(filter(self._covers, self._modules))
        if any(len(self._shapes[name]) != 2 for name in self._in_layers):
            most = max(len(self._shapes[name]) for name in self._in_layers)
            raise SettingError(
                "--adapter",
                str(file.parent),
                f"none for this family, whose matrices have {most} dimensions",
                "leave --adapter out",
            )

    def changes(self, held: Mapping[str, StoredTensor]) -> dict[str, Change]:
        """By the name of the model's tensor."""
        self._require_targets()
        parts: dict[str, dict[str, StoredTensor]] = {}
        whole: dict[str, StoredTensor] = {}
        for name, tensor in held.items():
            if tensor.dtype not in PLAIN:
                raise self._wrong(
                    f"{quoted(name)} is stored as {tensor.dtype} (allowed: F32, BF16, F16)"
                )
            inner = name.removeprefix(_WRAPPED)
            end = next((end for end in _ENDS if inner.endswith(end)), None)
            module = inner.removesuffix(end or "")
            if inner == name or not self._is_known(module if end else inner, end):
                raise self._wrong(
                    f"tensor {quoted(name)} belongs to no module of this model (allowed: factors "
                    f"and weights of modules such as {quoted(_WRAPPED + self._example)})"
                )
            if end is None or end == _UNCHANGED:
                of = inner if end is None else f"{module}.weight"
                if of in whole:
                    raise self._wrong(f"it holds {quoted(whole[of].name)} and {quoted(name)}")
                whole[of] = tensor
            else:
                parts.setdefault(module, {})[end] = tensor
        low_rank = {f"{m}.weight": self._low_rank(m, found) for m, found in parts.items()}
        for name, tensor in whole.items():
            self._require_shape(tensor, self._shapes.get(name, tensor.shape))
        self._require_all(parts, whole)
        return {
            name: Change(whole.get(name), low_rank.get(name))
            for name in dict.fromkeys((*low_rank, *whole))
        }

    @property
    def _example(self) -> str:
        return _module(min(self._in_layers))

    def _is_known(self, name: str, end: str | None) -> bool:
        """Whether a module, or without an end a tensor, is one of the model's."""
        if end is None:
            return name in self._shapes or name in self._tied
        return name in self._modules

    def _require_targets(self) -> None:
        """Whatever the configuration names is there, and may be changed."""
        targets, covered = self._lora.targets, self._covered
        for name in targets.names:
            if not any(ends_with(module, name) for module in self._modules):
                raise UnsupportedAdapter(self._lora.file, "target_modules", name, self._last_names)
        if not covered:
            given = "all-linear" if targets.pattern is None else targets.pattern.pattern
            if targets.names:
                given = ", ".join(targets.names)
            raise UnsupportedAdapter(self._lora.file, "target_modules", given, self._last_names)
        for name in sorted(self._tied):
            module = _module(name)
            if module in covered or self._saves(name):
                field = "target_modules" if module in covered else "modules_to_save"
                raise UnsupportedAdapter(
                    self._lora.file,
                    field,
                    module.rpartition(".")[2],
                    "modules other than embedding and LM head, which are one matrix in this model",
                )
        tables = {_module(name) for name in self._tables}
        if self._lora.is_decomposed and covered & tables:
            raise UnsupportedAdapter(
                self._lora.file, "use_dora", value=True, allowed="false on an embedding"
            )

    @property
    def _last_names(self) -> str:
        names = dict.fromkeys(module.rpartition(".")[2] for module in sorted(self._modules))
        return ", ".join(names)

    def _covers(self, module: str) -> bool:
        if any(f".{name}." in f".{module}." for name in self._lora.saved):
            return False  # trained as a whole
        is_in_layer = f"{module}.weight" in self._in_layers
        return self._lora.targets.cover(module, is_in_layer=is_in_layer)

    def _saves(self, name: str) -> bool:
        """Whether a tensor belongs to a module that was trained as a whole, as peft finds it."""
        module = name.rpartition(".")[0]
        return any(module.endswith(end) for end in self._lora.saved)

    def _low_rank(self, module: str, found: Mapping[str, StoredTensor]) -> LowRank:
        if module not in self._covered:
            raise self._wrong(
                f"it holds factors of {quoted(module)}, which target_modules in "
                f"{ADAPTER_FILE} does not name"
            )
        rows, columns = self._shapes[f"{module}.weight"]
        is_table = f"{module}.weight" in self._tables
        ends = (_TABLE_A, _TABLE_B) if is_table else (_A, _B)
        wanted = (*ends, _LENGTHS) if self._lora.is_decomposed else ends
        for end in wanted:
            if end not in found:
                raise self._wrong(f"tensor {quoted(_WRAPPED + module + end)} is missing")
        for end in found:
            if end not in wanted:
                raise self._wrong(
                    f"tensor {quoted(found[end].name)} is there, which {ADAPTER_FILE} does not "
                    f"call for"
                )
        rank = self._lora.rank(module)
        if is_table:
            rows, columns = columns, rows
        self._require_shape(found[ends[0]], (rank, columns))
        self._require_shape(found[ends[1]], (rows, rank))
        lengths = found.get(_LENGTHS)
        if lengths is not None:
            self._require_shape(lengths, (rows,))
        return LowRank(found[ends[0]], found[ends[1]], self._lora.scale(module), is_table, lengths)

    def _require_all(self, parts: Mapping[str, object], whole: Mapping[str, StoredTensor]) -> None:
        """Nothing that the configuration names is left as it is, and nothing else is replaced."""
        for name in sorted(self._matrices):
            if (module := _module(name)) not in parts and module in self._covered:
                raise self._wrong(f"tensor {quoted(_WRAPPED + module + _A)} is missing")
        for name, tensor in whole.items():
            if not (self._saves(name) or _module(name) in parts):
                raise self._wrong(
                    f"tensor {quoted(tensor.name)} is there, but modules_to_save in "
                    f"{ADAPTER_FILE} does not name its module"
                )
        for end in self._lora.saved:
            names = [name for name in self._shapes if name.rpartition(".")[0].endswith(end)]
            if not names:
                raise UnsupportedAdapter(
                    self._lora.file, "modules_to_save", end, "modules of this model"
                )
            for name in names:
                if name not in whole:
                    raise self._wrong(f"tensor {quoted(_WRAPPED + name)} is missing")

    def _require_shape(self, tensor: StoredTensor, wanted: tuple[int, ...]) -> None:
        if tensor.shape != wanted:
            raise self._wrong(
                f"tensor {quoted(tensor.name)} has shape {list(tensor.shape)}; the model and "
                f"{ADAPTER_FILE} call for {list(wanted)}"
            )

    def _wrong(self, seen: str) -> AdapterMismatch:
        return AdapterMismatch(str(self._file), seen, self._lora.base)


def _require_plain(
    folder: Path,
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    changes: Mapping[str, Change],
) -> None:
    for spec in specs:
        for source, matrix in zip(spec.sources, checkpoint.matrices(spec), strict=True):
            if matrix is not None and source.name in changes:
                raise AdapterOnCodes(str(folder), source.name, in_words(matrix.scheme))


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")
