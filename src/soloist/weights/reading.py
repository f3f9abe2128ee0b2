"""From checkpoint files to the tensors of a model: mapped, joined, converted and checked."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from soloist.errors import CheckpointError, NotFinite
from soloist.model.checkpoint import Checkpoint, open_file, stored_dtype
from soloist.model.dtype import Dtype
from soloist.model.tensors import TensorSpec
from soloist.model.torch_types import TORCH_DTYPES, Weights


class StoredFile(Protocol):
    """An opened file of a checkpoint."""

    def get_tensor(self, name: str) -> Tensor:
        """As stored, on any device; valid while the file is open."""
        ...


def open_stored(file: Path) -> AbstractContextManager[StoredFile]:
    """Map a file into host memory.

    Raises:
        TruncatedFile: its header or length is wrong.
    """
    return cast("AbstractContextManager[StoredFile]", open_file(file, "pt"))


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
    open_with: Callable[[Path], AbstractContextManager[StoredFile]] = open_stored,
) -> Weights:
    """Read every tensor that `specs` call for, as `read_tensors` does."""
    return dict(read_tensors(checkpoint, specs, dtype, device, on_progress, open_with))


def read_tensors(
    checkpoint: Checkpoint,
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    device: torch.device,
    on_progress: Callable[[LoadProgress], None] = lambda _: None,
    open_with: Callable[[Path], AbstractContextManager[StoredFile]] = open_stored,
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that `specs` call for, one by one; the checkpoint was held against them.

    `open_with` opens its files.

    Raises:
        NotFinite: a tensor holds NaN or infinite values, as stored or after conversion.
        CheckpointError: a tensor's format is not supported, or a second copy of it differs.
    """
    specs = tuple(specs)
    sizes = {s.name: _stored_bytes(checkpoint, s.name) for spec in specs for s in spec.sources}
    total, done, start = sum(sizes.values()), 0, time.perf_counter()
    with ExitStack() as stack:
        handles = _Handles(stack, open_with)
        for spec in specs:
            joined = torch.empty(spec.shape, dtype=TORCH_DTYPES[dtype], device=device)
            parts = _parts(joined, spec)
            for source, part in zip(spec.sources, parts, strict=True):
                stored = handles.open(checkpoint.tensors[source.name].file).get_tensor(source.name)
                part.copy_(stored)
                _require_finite(source.name, part)
                done += sizes[source.name]
                on_progress(LoadProgress(done, total, time.perf_counter() - start))
            for name in spec.copies:
                if name in checkpoint.tensors:
                    copy = handles.open(checkpoint.tensors[name].file).get_tensor(name)
                    _require_same(spec.sources[0].name, joined, name, copy)
            yield spec.name, joined


class _Handles:
    """Open each file once."""

    def __init__(
        self, stack: ExitStack, open_with: Callable[[Path], AbstractContextManager[StoredFile]]
    ) -> None:
        self._stack, self._open_with = stack, open_with
        self._open: dict[Path, StoredFile] = {}

    def open(self, file: Path) -> StoredFile:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(self._open_with(file))
        return self._open[file]


def _parts(joined: Tensor, spec: TensorSpec) -> Iterator[Tensor]:
    start = 0
    for source in spec.sources:
        rows = source.shape[spec.axis]
        yield joined.narrow(spec.axis, start, rows)
        start += rows


def _stored_bytes(checkpoint: Checkpoint, name: str) -> int:
    stored = checkpoint.tensors[name]
    count = 1
    for size in stored.shape:
        count *= size
    return count * stored_dtype(checkpoint, stored.dtype).num_bytes


def _require_same(name: str, values: Tensor, copy_name: str, copy: Tensor) -> None:
    if not torch.equal(values, copy.to(values.device, values.dtype)):
        raise CheckpointError(
            f"tensor '{copy_name}' differs from '{name}', but config.json says that they are equal",
            "set tie_word_embeddings to false if the model has a separate LM head",
        )


def _require_finite(name: str, values: Tensor) -> None:
    # One sum finds every NaN and infinity in a single pass; the exact count is for the message.
    if math.isfinite(values.sum(dtype=torch.float32).item()):
        return
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise NotFinite(name, bad, values.numel())
