"""Feed training: encode one epoch ahead in another process and hand out batches of windows.

Progress holds the position, so a resumed run continues with the windows that it has not seen.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from documents import read_documents
from pack import encode, windows


@dataclass
class Progress:
    """Where a run stands; saved with the weights."""

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    windows_used: int = 0  # of this epoch
    long: bool = False
    seconds: float = 0.0
    best_loss: float = math.inf


@dataclass(frozen=True)
class Plan:
    """How the tokens are cut: short windows first, long ones from a given count of tokens on."""

    batch_tokens: int
    window: int
    long_window: int
    long_from: float


@dataclass(frozen=True)
class Corpus:
    """Where the text is; a share below one keeps every n-th document, for trials."""

    documents: Path
    tokenizer: Path
    share: float


@cache
def _load(corpus: Corpus) -> tuple[Tokenizer, list[str]]:
    texts = [document.text for document in read_documents(corpus.documents, "train")]
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json"))
    return tokenizer, texts[:: round(1 / corpus.share)]


def _encode_epoch(corpus: Corpus, epoch: int, scratch: Path) -> Path:
    # A file, since a pipe between the processes would pickle hundreds of megabytes.
    path = scratch / f"epoch-{epoch}-{os.getpid()}.npy"
    np.save(path, encode(*_load(corpus), seed=epoch))
    return path


class Epochs:
    """Token streams of successive epochs, the next one made while this one is used."""

    def __init__(self, corpus: Corpus, first: int, scratch: Path) -> None:
        # spawn: a forked child of a process that holds a GPU context cannot run.
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.corpus = corpus
        self.upcoming = first
        self.scratch = scratch
        self.future = self._start()

    def _start(self) -> Future[Path]:
        return self.pool.submit(_encode_epoch, self.corpus, self.upcoming, self.scratch)

    def take(self) -> tuple[int, np.ndarray]:
        """Return the next epoch's number and stream [T] uint16, and start on the one after it."""
        epoch, path = self.upcoming, self.future.result()
        stream = np.load(path)
        path.unlink()
        self.upcoming += 1
        self.future = self._start()
        return epoch, stream

    def close(self) -> None:
        """Drop the epoch in the making."""
        self.future.cancel()
        self.pool.shutdown(cancel_futures=True)
        if not self.future.cancelled():
            self.future.result().unlink(missing_ok=True)


def batches(plan: Plan, epochs: Epochs, progress: Progress) -> Iterator[np.ndarray]:
    """Yield [windows, length + 1] uint16 without end, keeping the position in progress."""
    while True:
        epoch, stream = epochs.take()
        if epoch != progress.epoch:
            progress.epoch, progress.windows_used = epoch, 0
        length = plan.long_window if progress.long else plan.window
        cut = windows(stream, length, seed=epoch)
        size = plan.batch_tokens // length
        while progress.windows_used + size <= len(cut):
            start = progress.windows_used
            progress.windows_used += size
            yield cut[start : start + size]
            if not progress.long and progress.tokens >= plan.long_from:
                progress.long = True  # with the next epoch's stream
                break
