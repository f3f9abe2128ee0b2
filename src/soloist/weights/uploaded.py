"""Tensors of files that began their way to the GPU before torch was imported."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from soloist.weights.reading import OpenStored, StoredFile, open_stored
from soloist.weights.upload import Upload

_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@contextmanager
def early_files(upload: Upload | None, device: torch.device) -> Iterator[OpenStored]:
    """Read files where they were uploaded, all others from disk; at the end the upload is closed.

    Args:
        upload: of files that may be wanted; None reads all from disk.
        device: where tensors are wanted: on another one than `upload` is for, files are read from
            disk.
    """
    if upload is None:
        yield open_stored
        return
    with closing(upload):
        is_there = device == torch.device(upload.device)
        yield partial(_open, upload, device) if is_there else open_stored


@contextmanager
def _open(upload: Upload, device: torch.device, file: Path) -> Iterator[StoredFile]:
    if (address := upload.address(file)) is not None:
        yield _Uploaded(file, address, device)
        torch.cuda.synchronize(device)  # copies of its tensors have been made
        return
    with open_stored(file) as opened:
        yield opened


class _Bytes:
    """Memory of a GPU as torch can take it up, without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (num_bytes,), "typestr": "|u1", "data": (address, False),
        }  # fmt: skip


class _Uploaded:
    """One safetensors file in a GPU's memory: a length, as much JSON, then the tensors' bytes."""

    def __init__(self, file: Path, address: int, device: torch.device) -> None:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            self._header = json.loads(opened.read(length))
        num_bytes = file.stat().st_size - 8 - length
        with torch.cuda.device(device):
            self._values = torch.as_tensor(_Bytes(address, 8 + length + num_bytes), device=device)
        self._start = 8 + length

    def get_tensor(self, name: str) -> Tensor:
        """See StoredFile; a view, where its bytes lie as the type needs it."""
        found = self._header[name]
        begin, end = (self._start + offset for offset in found["data_offsets"])
        raw, dtype = self._values[begin:end], _DTYPES[found["dtype"]]
        if begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(found["shape"])
