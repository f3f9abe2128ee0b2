"""Agents' loops over a folder of saved prompts: restarts, cancels, a full disk, damaged files.

Whatever happens, an answer has the bits of an executor that saves nothing.
"""

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soloist.engine.reference import ReferenceModel
from soloist.kv import saving
from soloist.kv.folder import ChunkFolder, Link
from soloist.kv.saving import SavedTokens
from unit.engine.test_cached_bits import Parts
from unit.engine.test_reference import answer, executor, opened, tokens
from unit.engine.test_saved_prompts import kernel
from unit.prefill.models import MODELS

# What a few prompts take, so that files come and go.
BOUND = 2_000_000


class Drive:
    """A drive that is full at times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.num_refused = False, 0
        rng = random.Random(9)  # of the thread that writes
        real = ChunkFolder.write

        def write(folder: ChunkFolder, link: Link, parts: Sequence[memoryview]) -> int:
            if self.is_full and rng.random() < 0.5:
                self.num_refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(folder, link, parts)

        monkeypatch.setattr(ChunkFolder, "write", write)
        monkeypatch.setattr(saving, "_PAUSE_S", 0.0)


def damage(root: Path, rng: random.Random) -> None:
    """One file or another: a wrong bit, an end that is cut off, or nothing left of it."""
    files = sorted(root.glob("*/*.kv"))
    if not files:
        return
    file, what = rng.choice(files), rng.randrange(3)
    try:
        if what == 0:
            content = bytearray(file.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            file.write_bytes(content)
        elif what == 1:
            os.truncate(file, rng.randrange(file.stat().st_size))
        else:
            file.unlink()
    except FileNotFoundError:
        pass  # deleted meanwhile for others


def conversation(rng: random.Random, known: list[list[int]], most: int = 900) -> list[int]:
    """A new one, or an earlier one that goes on, maybe from its middle."""
    if not known or rng.random() < 0.2:
        prompt = tokens(rng.randrange(40, most // 3), rng.randrange(10**6))
    else:
        before = rng.choice(known)
        begin = before[: rng.randrange(1, len(before) + 1)] if rng.random() < 0.3 else before
        prompt = (begin + tokens(rng.randrange(1, most // 10), rng.randrange(10**6)))[:most]
    known.append(prompt)
    return prompt


def test_agents_on_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    drive, known, all_counts = Drive(monkeypatch), list[list[int]](), list[SavedTokens]()

    def started() -> ReferenceModel:
        made = executor(keeps_prefixes=True)
        made.save_to(tmp_path, BOUND, ())
        return made

    monkeypatch.setattr(ReferenceModel, "_part_s", 0.0)
    one, num_hits = started(), 0
    for _ in range(60):
        drive.is_full = rng.random() < 0.2
        if rng.random() < 0.25:
            damage(tmp_path, rng)
        if rng.random() < 0.25:
            assert one.saved is not None
            all_counts.append(one.saved)
            one = started()
        prompt = conversation(rng, known)
        running = opened(one, prompt, most=3)
        if rng.random() < 0.2:
            for _ in range(rng.randrange(4)):
                if not running.is_read:
                    one.read(running)
            one.free(running)
        else:
            fresh = executor()
            assert answer(one, running) == answer(fresh, opened(fresh, prompt, most=3))
            num_hits += running.num_cached > 0
        one.check()
        assert one.num_pages_free == one.num_pages
        one.flush(10)
    assert one.saved is not None
    all_counts.append(one.saved)
    assert num_hits > 15
    assert drive.num_refused > 0
    for counted in ("saved", "loaded", "dropped", "damaged", "evicted"):
        assert sum(getattr(counts, counted) for counts in all_counts), counted
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*.kv")) <= BOUND * 1.2


def test_agents_on_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(8)
    drive, known = Drive(monkeypatch), list[list[int]]()
    one, num_loaded = kernel(tmp_path, "gqa-tied", has_host=True), 0
    for _ in range(25):
        drive.is_full = rng.random() < 0.2
        if rng.random() < 0.3:
            damage(tmp_path, rng)
        if rng.random() < 0.7:
            assert one.executor.saved is not None
            num_loaded += one.executor.saved.loaded
            one.executor.flush(10)
            one = kernel(tmp_path, "gqa-tied", has_host=True)
        prompt = conversation(rng, known, 2500)
        logits, pages, _ = one.read(prompt)
        plain = Parts(replace(MODELS["gqa-tied"], context_tokens=3072), torch.bfloat16)
        wanted, wanted_pages, _ = plain.read(prompt)
        assert torch.equal(logits, wanted)
        assert torch.equal(pages, wanted_pages)
        one.executor.check()
    assert num_loaded > 2000
