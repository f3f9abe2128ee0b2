"""From checkpoint files to the tensors of a model: mapped, joined, converted and checked."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from soloist.errors import CheckpointError
from soloist.model.checkpoint import Checkpoint, open_file, stored_dtype
from soloist.model.dtype import Dtype
from soloist.model.quantized import COLUMNS, Quantized
from soloist.model.tensors import Source, TensorSpec
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.finite import require_finite
from soloist.weights.mapped import map_file, tensor_in

if TYPE_CHECKING:
    from soloist.model.adapter import Adapter
    from soloist.model.quantization.matrices import StoredMatrix
    from soloist.model.quantization.scheme import Role
    from soloist.weights.decoding.parts import Decoded


class StoredFile(Protocol):
    """An opened file of a checkpoint."""

    def get_tensor(self, name: str) -> Tensor:
        """As stored, on any device; valid while the file is open."""
        ...


# Of a matrix that is decoded some rows after the other.
_VALUES_AT_ONCE = 1 << 22
# The same where codes are kept: fewer pieces for a GPU, that each are a fraction of a matrix.
_BLOCKS_AT_ONCE = 1 << 25

OpenStored = Callable[[Path], AbstractContextManager[StoredFile]]


def open_stored(file: Path) -> AbstractContextManager[StoredFile]:
    """Map a file into host memory.

    Raises:
        TruncatedFile: its header or length is wrong.
    """
    return cast("AbstractContextManager[StoredFile]", open_file(file, "pt"))


@dataclass(frozen=True, slots=True)
class Forms:
    """Which tensors are wanted in another form than numbers; by name.

    Attributes:
        keep: they come as several, each under the name and the end of a part's. What they mean is
            what `joined` or `rounding` says of them; codes of a permuted matrix lie by group, also
            where it is wanted without its table of columns.
        rounding: 16-bit matrices whose numbers are first rounded to codes, as they are stored.
        adapter: is merged into tensors of the files before anything else is done with them.
        made_on: the device that rounds and merges; None where tensors are read to.
        in_files: these come as they lie in the files, a tensor for each source, under the name and
            the source's number; see `left_in_files`.
    """

    keep: Mapping[str, Quantized] = field(default_factory=dict)
    rounding: Mapping[str, Quantized] = field(default_factory=dict)
    adapter: "Adapter | None" = None
    made_on: torch.device | None = None
    in_files: frozenset[str] = frozenset()

    def matrices(
        self, checkpoint: Checkpoint, spec: TensorSpec
    ) -> "tuple[StoredMatrix | None, ...]":
        """How each source of a tensor is quantised in the files; None where it is not."""
        if spec.name in self.rounding:
            return (None,) * len(spec.sources)
        return checkpoint.matrices(spec)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come, in bytes of the checkpoint."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def gb_per_s(self) -> float:
        """Rate so far."""
        return self.done_bytes / max(self.elapsed_s, 1e-9) / 1e9


def load_weights(
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    device: torch.device,
    on_progress: Callable[[LoadProgress], None] = lambda _: None,
    open_with: OpenStored = open_stored,
    forms: Forms | None = None,
) -> Weights:
    """Read every tensor that `specs` call for, as `read_tensors` does."""
    return dict(read_tensors(checkpoint, specs, dtype, device, on_progress, open_with, forms))


def read_tensors(
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    device: torch.device,
    on_progress: Callable[[LoadProgress], None] = lambda _: None,
    open_with: OpenStored = open_stored,
    forms: Forms | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that `specs` call for, one by one; the checkpoint was held against them.

    What is quantised comes as the numbers that it stands for, computed in fp32 and rounded once.

    Args:
        checkpoint: the files.
        specs: what to read.
        dtype: of what is yielded, but for what is kept.
        device: where to.
        on_progress: told after every tensor of the files.
        open_with: opens the files.
        forms: which tensors stay quantised, or become so; None leaves all as numbers.

    Raises:
        NotFinite: a tensor holds NaN or infinite values, as stored or after conversion.
        CheckpointError: a tensor's format is not supported, or a second copy of it differs.
    """
    specs, forms = tuple(specs), forms or Forms()
    with ExitStack() as stack:
        files = _Files(checkpoint, _Handles(stack, open_with), device, forms)
        progress = _Progress(checkpoint, specs, forms, on_progress)
        for spec in specs:
            if spec.name in forms.in_files:
                yield from _mapped(files, spec, progress)
                continue
            to = forms.rounding.get(spec.name)
            if spec.name in forms.keep and to is None:
                yield from _kept(files, spec, forms.keep[spec.name], progress)
                continue
            read_in = spec.held_in(dtype) if to is None else to.scale_dtype
            whole = torch.empty(spec.shape, dtype=TORCH_DTYPES[read_in], device=device)
            sources = zip(
                spec.sources, forms.matrices(checkpoint, spec), _parts(whole, spec), strict=True
            )
            for source, matrix, part in sources:
                if matrix is None:
                    part.copy_(files.tensor(source.name))
                else:
                    _write(files, matrix, part)
                require_finite(checkpoint.named(source.name), part)
                progress.add(checkpoint, source, matrix)
            for name in spec.copies:
                if name in checkpoint.tensors:
                    _require_same(spec.sources[0].name, whole, name, files.tensor(name))
            if to is None:
                yield spec.name, whole
                continue
            yield from _rounded(whole, spec.name, to, forms, dtype)


def _mapped(
    files: "_Files", spec: TensorSpec, progress: "_Progress"
) -> Iterator[tuple[str, Tensor]]:
    """Each source as a part of its file's memory, read and let go by the system."""
    for i, source in enumerate(spec.sources):
        values = files.tensor(source.name)
        require_finite(files.checkpoint.named(source.name), values)
        progress.add(files.checkpoint, source, None)
        yield f"{spec.name}.{i}", values


def _rounded(
    whole: Tensor, name: str, to: Quantized, forms: Forms, dtype: Dtype
) -> Iterator[tuple[str, Tensor]]:
    """A 16-bit matrix as codes: their parts where they are kept, otherwise the numbers."""
    from soloist.weights.numbers import as_numbers
    from soloist.weights.quantizing import quantize

    parts = quantize(whole.to(forms.made_on or whole.device), to)
    parts = {part: values.to(whole.device) for part, values in parts.items()}
    if name in forms.keep:
        yield from ((name + part, values) for part, values in parts.items())
    else:
        yield name, as_numbers(to, parts, dtype)


def _write(files: "_Files", matrix: "StoredMatrix", out: Tensor) -> None:
    """The numbers of a quantised matrix; where rows stand alone, some after the other."""
    from soloist.model.quantization.scheme import Layout, Role
    from soloist.weights.decoding import decode
    from soloist.weights.numbers import write_numbers

    if matrix.scheme.layout is not Layout.BLOCKS:
        decoded = files.decoded(matrix)
        write_numbers(decoded.quantized, decoded.parts, out, decoded.groups)
        return
    (blocks,) = files.parts(matrix).values()
    for rows in _some_rows(matrix, _VALUES_AT_ONCE):
        decoded = decode(matrix, {Role.CODES: blocks[rows]})
        write_numbers(decoded.quantized, decoded.parts, out[rows])


def _some_rows(matrix: "StoredMatrix", values: int) -> Iterator[slice]:
    """All rows of a matrix, about so many values at a time."""
    step = max(1, values // matrix.columns)
    return (slice(start, start + step) for start in range(0, matrix.rows, step))


def _kept(
    files: "_Files", spec: TensorSpec, wanted: Quantized, progress: "_Progress"
) -> Iterator[tuple[str, Tensor]]:
    """A tensor's parts, each with the rows of all sources."""
    from soloist.model.quantization.matrices import joined
    from soloist.weights.numbers import widened

    found = joined(files.checkpoint.quantization, spec)
    assert found is not None, f"{spec.name} is no one matrix"
    # Where its activations come in the order of its codes nobody needs the table of columns.
    is_as_wanted = wanted in (found, replace(found, permuted=False))
    assert is_as_wanted, f"{spec.name} is {found}, not {wanted}"
    parts: dict[str, list[Tensor]] = {part: [] for part in wanted.parts}
    for source, matrix in zip(spec.sources, files.checkpoint.matrices(spec), strict=True):
        assert matrix is not None, f"{source.name} stands for itself"
        values = widened(matrix.quantized, files.decoded(matrix).by_group(), wanted)
        for part, rows in parts.items():
            rows.append(values[part])
        progress.add(files.checkpoint, source, matrix)
    for part, rows in parts.items():
        if part == COLUMNS:  # of all rows
            yield spec.name + part, rows[0]
            continue
        # Always copied: what was uploaded is there only while its file is open.
        yield spec.name + part, _joined(rows)


def _joined(rows: list[Tensor]) -> Tensor:
    """Below each other; of FP8 as bytes, which every torch can join."""
    dtype = rows[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(rows)
    return torch.cat([values.view(torch.uint8) for values in rows]).view(dtype)


class _Files:
    """Tensors of a checkpoint, as stored or decoded, with what an adapter changes."""

    def __init__(
        self, checkpoint: Checkpoint, handles: "_Handles", device: torch.device, forms: Forms
    ) -> None:
        self.checkpoint, self.device = checkpoint, device
        self._handles, self._made_on = handles, forms.made_on or device
        self._changes = {} if forms.adapter is None else forms.adapter.changes
        self._map = cache(map_file)

    def tensor(self, name: str) -> Tensor:
        """In the type in which it is stored, wherever its file is open or where it was merged."""
        values, change = self._stored(name), self._changes.get(name)
        if change is None:
            return values
        from soloist.weights.merging import merged

        return merged(name, values, change, self._made_on)

    def _stored(self, name: str) -> Tensor:
        stored = self.checkpoint.tensors[name]
        if stored.place is not None:
            return tensor_in(self._map(stored.file), stored, stored.place)
        return stored.in_file(self._handles.open(stored.file).get_tensor)

    def parts(self, matrix: "StoredMatrix") -> "dict[Role, Tensor]":
        """The tensors that a quantised matrix is stored in, on the device."""
        return {
            role: self.tensor(stored.name).to(self.device)
            for role, stored in matrix.tensors.items()
        }

    def decoded(self, matrix: "StoredMatrix") -> "Decoded":
        """A quantised matrix, on the device."""
        from soloist.model.quantization.scheme import Layout, Role
        from soloist.weights.decoding import decode
        from soloist.weights.decoding.parts import Decoded

        tensors = self.parts(matrix)
        if matrix.scheme.layout is not Layout.BLOCKS:
            return decode(matrix, tensors)
        # What blocks are taken apart into takes several times their room.
        pieces = [
            decode(matrix, {Role.CODES: tensors[Role.CODES][rows]}).parts
            for rows in _some_rows(matrix, _BLOCKS_AT_ONCE)
        ]
        parts = {part: torch.cat([own[part] for own in pieces]) for part in pieces[0]}
        return Decoded(matrix.quantized, parts)


class _Progress:
    """Bytes of the files, counted as they are read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        specs: Iterable[TensorSpec],
        forms: Forms,
        on_progress: Callable[[LoadProgress], None],
    ) -> None:
        self._tell, self._start, self._done = on_progress, time.perf_counter(), 0
        self._total = sum(
            _stored_bytes(checkpoint, source, matrix)
            for spec in specs
            for source, matrix in zip(spec.sources, forms.matrices(checkpoint, spec), strict=True)
        )

    def add(self, checkpoint: Checkpoint, source: Source, matrix: "StoredMatrix | None") -> None:
        """One more source has been read."""
        self._done += _stored_bytes(checkpoint, source, matrix)
        self._tell(LoadProgress(self._done, self._total, time.perf_counter() - self._start))


class _Handles:
    """Open each file once."""

    def __init__(self, stack: ExitStack, open_with: OpenStored) -> None:
        self._stack, self._open_with = stack, open_with
        self._open: dict[Path, StoredFile] = {}

    def open(self, file: Path) -> StoredFile:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(self._open_with(file))
        return self._open[file]


def _parts(whole: Tensor, spec: TensorSpec) -> Iterator[Tensor]:
    start = 0
    for source in spec.sources:
        rows = source.shape[spec.axis]
        yield whole.narrow(spec.axis, start, rows)
        start += rows


def _stored_bytes(checkpoint: Checkpoint, source: Source, matrix: "StoredMatrix | None") -> int:
    if matrix is not None:
        return matrix.num_bytes
    stored = checkpoint.tensors[source.name]
    stored_dtype(checkpoint, stored.dtype)
    return stored.num_bytes


def _require_same(name: str, values: Tensor, copy_name: str, copy: Tensor) -> None:
    if not torch.equal(values, copy.to(values.device, values.dtype)):
        raise CheckpointError(
            f"tensor '{copy_name}' differs from '{name}', but config.json says that they are equal",
            "set tie_word_embeddings to false if the model has a separate LM head",
        )
