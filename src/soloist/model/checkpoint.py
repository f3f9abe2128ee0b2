"""A model's files of weights: which tensors they hold, checked before anything is read.

Headers are read through the safetensors library, which maps the files into memory and verifies that
every byte a header promises is there; those of GGUF files by `soloist.gguf`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from soloist.errors import (
    CheckpointError,
    IndexMismatch,
    MissingFile,
    MissingTensor,
    TruncatedFile,
    UnexpectedTensor,
    WrongShape,
    quoted,
)
from soloist.files import is_there, require_file
from soloist.gguf.names import is_gguf
from soloist.model.dtype import Dtype
from soloist.model.expert_files import parted
from soloist.model.folder import CONFIG_FILE
from soloist.model.foreign import hint_for, require_no_adapter
from soloist.model.quantization import read_quantization
from soloist.model.reading import read_json
from soloist.model.shards import INDEX_FILE, SINGLE_FILE, weight_places
from soloist.model.stored import PLAIN, StoredTensor
from soloist.model.tensors import TensorSpec

if TYPE_CHECKING:
    from soloist.model.quantization.matrices import Quantization, StoredMatrix
    from soloist.model.quantization.scheme import Method

_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}
_NAMES = {dtype: name for name, dtype in PLAIN.items()}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened set of files: names, shapes and places, no data.

    Attributes:
        folder: where they are; or the GGUF file, of several the first.
        tensors: by the names that families know.
        quantization: how matrices are stored where they do not stand for themselves.
        config_dtype: what config.json calls the model's type.
        described_by: what says which tensors there should be.
        named: what the files call a tensor that families know under another name.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    quantization: "Quantization | None" = None
    config_dtype: str | None = None
    described_by: str = CONFIG_FILE
    named: Callable[[str], str] = str

    @property
    def dtype(self) -> Dtype:
        """The type that most tensors are stored in; of quantised ones the model's 16-bit type.

        Raises:
            CheckpointError: a tensor has a type that is no plain float.
        """
        if self.quantization is None:
            return stored_dtype(self, _most([stored.dtype for stored in self.tensors.values()]))
        if self.config_dtype in _DTYPES:
            return _DTYPES[self.config_dtype]
        norms = [t.dtype for t in self.tensors.values() if t.name.endswith("norm.weight")]
        dtype = stored_dtype(self, _most(norms)) if norms else Dtype.FP32
        # Quantised weights are no more exact in fp32.
        return Dtype.BF16 if dtype is Dtype.FP32 else dtype

    @property
    def growth(self) -> int:
        """Bytes that 16-bit numbers of the files take, at most, for one of the files' bytes."""
        return 1 if self.quantization is None else 4

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def files(self) -> list[Path]:
        """The files, in order of name."""
        return sorted({stored.file for stored in self.tensors.values()})

    def check(self, specs: Iterable[TensorSpec], ignored: Iterable[str] = ()) -> None:
        """Hold the files against what the configuration calls for.

        Raises:
            MissingTensor, UnexpectedTensor, WrongShape: naming the tensors.
            CheckpointError: a tensor has a type that is not read, or another one than the
                quantisation says.
        """
        specs = tuple(specs)
        missing = sorted({name for spec in specs for name in self._missing(spec)})
        if missing:
            names = [self.named(name) for name in missing]
            raise MissingTensor(str(self.folder), names, self.described_by)
        wanted, quantised = self._wanted(specs)
        copies = {name: spec.shape for spec in specs for name in spec.copies}
        patterns = [re.compile(pattern) for pattern in ignored]
        if self.quantization is not None:
            from soloist.model.quantization.matrices import IGNORED

            patterns += [re.compile(pattern) for pattern in IGNORED]
        unexpected = [
            name
            for name in sorted(self.tensors.keys() - wanted.keys() - copies.keys() - quantised)
            if not any(pattern.fullmatch(name) for pattern in patterns)
            and not self._adds_nothing(name, quantised)
        ]
        if unexpected:
            names = [self.named(name) for name in unexpected]
            raise UnexpectedTensor(str(self.folder), names, self.described_by)
        for name, shape in (
            wanted | {k: v for k, v in copies.items() if k in self.tensors}
        ).items():
            if self.tensors[name].shape != shape:
                stored = self.tensors[name]
                raise WrongShape(stored.shown, stored.shape, shape, self.described_by)
            stored_dtype(self, self.tensors[name].dtype)

    def _adds_nothing(self, name: str, quantised: Iterable[str]) -> bool:
        """A bias of zeros beside a quantised matrix: some tools stored one for every matrix."""
        stored = self.tensors[name]
        codes = name.removesuffix("bias") + "qweight"
        if codes not in quantised or not name.endswith(".bias") or stored.dtype == "BF16":
            return False
        return not _read(stored).any()

    def _missing(self, spec: TensorSpec) -> list[str]:
        if self.quantization is not None:
            return self.quantization.missing(spec)
        return [source.name for source in spec.sources if source.name not in self.tensors]

    def _wanted(self, specs: Iterable[TensorSpec]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Shapes of tensors that stand for themselves, and names of those that do not."""
        plain: dict[str, tuple[int, ...]] = {}
        quantised: set[str] = set()
        for spec in specs:
            for source, matrix in zip(spec.sources, self.matrices(spec), strict=True):
                if matrix is None:
                    plain[source.name] = source.shape
                else:
                    quantised |= {stored.name for stored in matrix.tensors.values()}
        return plain, quantised

    def matrices(self, spec: TensorSpec) -> "tuple[StoredMatrix | None, ...]":
        """How each source of a tensor is quantised; None for one that stands for itself.

        Raises:
            CheckpointError: files and configuration disagree.
        """
        if self.quantization is None:
            return (None,) * len(spec.sources)
        return self.quantization.stored(spec)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a single or sharded checkpoint: safetensors in a folder, or a GGUF file.

    Raises:
        CheckpointError: files are missing, cut off, or disagree with their index.
        ConfigError: config.json says that they are quantised in a way that is not read.
    """
    if is_gguf(folder):
        return _open_gguf(folder)
    index = folder / INDEX_FILE
    if is_there(index) and is_there(folder / SINGLE_FILE):
        raise CheckpointError(
            f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE}",
            "remove the one that does not belong to this checkpoint",
        )
    places = weight_places(folder)
    files = _shards(folder, places.values()) if places else [_single(folder)]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for stored in read_header(file):
            if stored.name in tensors:
                raise CheckpointError(
                    f"tensor {quoted(stored.name)} is both in "
                    f"{tensors[stored.name].file.name} and in {file.name}",
                    "remove the copy that does not belong to this checkpoint",
                )
            tensors[stored.name] = stored
    _check_places(index, places, tensors)
    if not tensors:
        raise TruncatedFile(str(files[0]), "it holds no tensors")
    config = _config(folder)
    tensors = parted(tensors, config.get("model_type"))
    method = read_quantization(folder, config)
    dtype = config.get("dtype", config.get("torch_dtype"))
    return Checkpoint(
        folder,
        tensors,
        None if method is None else _quantization(method, tensors),
        dtype if isinstance(dtype, str) else None,
    )


def _quantization(
    method: "Method", tensors: Mapping[str, StoredTensor], *, embeds: bool = False
) -> "Quantization":
    from soloist.model.quantization.matrices import Quantization

    return Quantization(cache(method), tensors, cache(_read), embeds)


def _open_gguf(file: Path) -> Checkpoint:
    from soloist.gguf.splits import read_gguf
    from soloist.model.gguf.configuration import family_of
    from soloist.model.gguf.naming import to_gguf
    from soloist.model.gguf.tensors import stored_tensors
    from soloist.model.quantization.gguf import SCHEMES, method_of

    gguf = read_gguf(file)
    tensors = stored_tensors(gguf)
    if not tensors:
        raise TruncatedFile(str(file), "it holds no tensors")
    types = {stored.dtype for stored in tensors.values()}
    method = method_of(tensors) if types & SCHEMES.keys() else None
    return Checkpoint(
        file,
        tensors,
        None if method is None else _quantization(method, tensors, embeds=True),
        # Where some matrices are left in 16 bits, these keep theirs.
        next((name for name, dtype in _DTYPES.items() if _NAMES[dtype] in types), None),
        described_by="its metadata",
        named=partial(to_gguf, family=family_of(gguf)),
    )


def open_file(file: Path, framework: str) -> Any:  # noqa: ANN401 - the library's handle is untyped
    """Map one safetensors file; `framework` is 'np' for headers and 'pt' for tensors.

    Raises:
        NotAFile: it is a folder, a pipe or a device.
        TruncatedFile: its header or length is wrong.
    """
    try:
        require_file(file)
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise TruncatedFile(str(file), f"{error} (the file has {size:,} bytes)") from error


def _read(stored: StoredTensor) -> Any:  # noqa: ANN401 - a numpy array, which is not imported
    with open_file(stored.file, "np") as handle:
        return stored.in_file(handle.get_tensor)


def stored_dtype(checkpoint: Checkpoint, name: str) -> Dtype:
    """Our type for one that safetensors names, or an error that says what is supported."""
    try:
        return PLAIN[name]
    except KeyError:
        raise CheckpointError(
            f"{checkpoint.folder} stores tensors as {name} (supported: F32, BF16, F16)",
            "use the unquantised checkpoint of this model",
        ) from None


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG_FILE
    return read_json(file) if file.exists() else {}


def _most(names: list[str]) -> str:
    return max(dict.fromkeys(names), key=names.count)


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        NotAFile: it is a folder, a pipe or a device.
        TruncatedFile: its header or length is wrong.
    """
    handle = open_file(file, "np")
    with handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return [
            StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        ]


def _single(folder: Path) -> Path:
    file = folder / SINGLE_FILE
    if is_there(file):
        return file
    found = sorted(p.name for p in folder.iterdir())
    require_no_adapter(folder, found)
    raise MissingFile(str(folder), f"{SINGLE_FILE} or {INDEX_FILE}", found, hint_for(found))


def _shards(folder: Path, listed: Iterable[str]) -> list[Path]:
    names = sorted(set(listed))
    for name in names:
        if not is_there(folder / name):
            found = sorted(p.name for p in folder.iterdir())
            raise MissingFile(
                str(folder),
                f"shard {quoted(name)}, one of {len(names)} that {INDEX_FILE} lists",
                found,
                "download the missing shard",
            )
    return [folder / name for name in names]


def _check_places(
    index: Path, places: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    """Every tensor is where the index says. One that it leaves out is held against config.json."""
    wrong = [
        name for name, at in places.items() if name not in tensors or tensors[name].file.name != at
    ]
    if wrong:
        told, held = places[wrong[0]], tensors.get(wrong[0])
        seen = "no shard holds it" if held is None else f"it is in {held.file.name}"
        raise IndexMismatch(str(index), wrong, told, seen)
