"""Read the corpus that collect.py wrote."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Document(NamedTuple):
    """One source file."""

    package: str
    path: str
    text: str


def read_documents(path: Path, split: str) -> Iterator[Document]:
    """Yield the documents of one split ("train" or "validation") in corpus order."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["split"] == split:
                yield Document(record["package"], record["path"], record["text"])
