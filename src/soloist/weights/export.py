"""Writes a planned export: a folder with quantised weights, in the format compressed-tensors.

Tensors pass one by one. What is not quantised keeps its bytes, and so do the files beside the
weights. config.json is written last: a folder without it is not finished.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from soloist.errors import DiskFull, NotFinite, SettingError, UserError
from soloist.model.folder import CONFIG_FILE
from soloist.model.quantized import SCALES
from soloist.model.shards import INDEX_FILE
from soloist.weights.compressed_tensors import stored
from soloist.weights.export_plan import ExportPlan, Piece
from soloist.weights.merging import merged
from soloist.weights.quantizing import quantize
from soloist.weights.reading import LoadProgress, StoredFile, open_stored
from soloist.weights.writing import SafetensorsFile, file_names, write_index

MOST_FILE_BYTES = 5_000_000_000

_COPIED = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja"),
    *("*.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*"),
)
# Of a tensor in a file's header and an index, with room to spare for config.json.
_NAME_BYTES = 512


def write_export(
    plan: ExportPlan, output: Path, on_progress: Callable[[LoadProgress], None] = lambda _: None
) -> list[Path]:
    """Write all files; what was begun is removed where that fails.

    Returns:
        The files of weights.

    Raises:
        SettingError: `output` is there already, and not an empty folder.
        DiskFull: the files do not fit; nothing was written.
        NotFinite: a matrix holds NaN or infinite values.
        UserError: the folder cannot be written.
    """
    _require_empty(output)
    _require_room(plan, output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        files = _write_weights(plan, output, on_progress)
        for path, place in _others(plan.source):
            (output / place).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, output / place)
        text = json.dumps(plan.config, indent=2, ensure_ascii=False)
        (output / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(output, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"{output} cannot be written: {error.strerror or error}",
                "name a folder that you may write to, on a disk with room",
            ) from error
        raise
    return files


def _require_empty(output: Path) -> None:
    if not output.exists():
        return
    found = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if output.is_dir() and not found:
        return
    seen = f"this one holds {', '.join(found[:3])}" if found else "this is a file"
    seen += ", …" if len(found) > 3 else ""
    raise SettingError(
        "--output",
        str(output),
        f"a new or empty folder; {seen}",
        "name another folder: nothing is overwritten",
    )


def _require_room(plan: ExportPlan, output: Path) -> None:
    place = next(path for path in (output, *output.absolute().parents) if path.is_dir())
    others = sum(path.stat().st_size for path, _ in _others(plan.source))
    names = _NAME_BYTES * sum(len(piece.entries) for piece in plan.pieces)
    needed, free = plan.num_bytes + others + names, shutil.disk_usage(place).free
    if needed > free:
        raise DiskFull(str(output), needed, free)


def _write_weights(
    plan: ExportPlan, output: Path, on_progress: Callable[[LoadProgress], None]
) -> list[Path]:
    shards = _shards(plan.pieces)
    files = dict(zip(file_names(len(shards)), shards, strict=True))
    listed = {
        name: [entry for piece in pieces for entry in piece.entries]
        for name, pieces in files.items()
    }
    total, done, start = sum(p.source_bytes for p in plan.pieces), 0, time.perf_counter()
    with ExitStack() as stack:
        opened: dict[Path, StoredFile] = {}
        for name, pieces in files.items():
            with SafetensorsFile(output / name, listed[name]) as file:
                for piece in pieces:
                    source = piece.source.file
                    if source not in opened:
                        opened[source] = stack.enter_context(open_stored(source))
                    for made_name, made in _made(plan, piece, opened[source]).items():
                        file.write(made_name, _bytes(made))
                    done += piece.source_bytes
                    on_progress(LoadProgress(done, total, time.perf_counter() - start))
    if len(files) > 1:
        write_index(output, listed)
    return [output / name for name in files]


def _shards(pieces: tuple[Piece, ...]) -> list[list[Piece]]:
    """The pieces of each file; one larger than a file may be has a file of its own."""
    shards: list[list[Piece]] = [[]]
    room = MOST_FILE_BYTES
    for piece in pieces:
        if shards[-1] and piece.num_bytes > room:
            shards.append([])
            room = MOST_FILE_BYTES
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def _made(plan: ExportPlan, piece: Piece, file: StoredFile) -> dict[str, Tensor]:
    """What is written of a piece, by name."""
    values = file.get_tensor(piece.source.name)
    change = None if plan.adapter is None else plan.adapter.changes.get(piece.source.name)
    if change is not None:
        values = merged(piece.source.name, values, change, values.device)
    if piece.module is None or piece.quantized is None:
        return {piece.source.name: values}
    parts = quantize(values, piece.quantized)
    if not parts[SCALES].isfinite().all():
        bad = int((~values.isfinite()).sum())
        raise NotFinite(piece.source.name, bad, values.numel())
    return stored(piece.module, parts, piece.quantized)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _others(source: Path) -> Iterator[tuple[Path, Path]]:
    """Files beside the weights that belong to the model, and their places in the folder."""
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in (CONFIG_FILE, INDEX_FILE):
                yield path, path.relative_to(source)
