"""Prompts from a folder have the bits of reading them, on both executors."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soloist.engine import Engine, EngineConfig
from soloist.engine.config import cache_dir_bytes
from soloist.engine.reference import ReferenceModel
from soloist.errors import SettingError
from soloist.kv.folder import ChunkFolder
from soloist.kv.folder import links as chunk_links
from soloist.kv.page_copies import PageCopies
from soloist.kv.saving import SavedTokens
from unit.engine.test_cached_bits import Parts
from unit.engine.test_reference import (
    answer,
    executor,
    keys,
    opened,
    read,
    same,
    tokens,
)
from unit.prefill.models import MODELS

MOST = 10**9


def saving(root: Path, *facts: object, **more: int) -> ReferenceModel:
    made = executor(keeps_prefixes=True, **more)
    made.save_to(root, MOST, facts)
    return made


def counts(one: ReferenceModel) -> SavedTokens:
    assert one.saved is not None
    return one.saved


@pytest.mark.parametrize("part_s", [0.0, 60.0])
def test_the_reference_goes_on_with_the_bits(
    tmp_path: Path, part_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceModel, "_part_s", part_s)
    stem = tokens(200, 1)
    first = saving(tmp_path)
    answer(first, opened(first, stem))
    first.flush(10)
    assert counts(first).saved == 192
    for shared, cached in ((150, 128), (199, 192), (64, 64), (5, 0)):
        prompt = stem[:shared] + tokens(60, shared)
        one, fresh = saving(tmp_path), executor()
        hit, miss = opened(one, prompt), opened(fresh, prompt)
        read(one, hit)
        read(fresh, miss)
        assert hit.num_cached == cached
        assert same(keys(one, hit, len(prompt)), keys(fresh, miss, len(prompt)))
        assert answer(one, hit) == answer(fresh, miss)
        one.check()
        assert counts(one).loaded == cached
        # Now the memory has it.
        again = opened(one, prompt)
        assert again.num_cached == (shared + 60) // 32 * 32
        one.free(again)
        one.check()
        one.flush(10)


def test_others_that_begin_alike_take_what_one_has_loaded(tmp_path: Path) -> None:
    first, prompt = saving(tmp_path), tokens(200, 1)
    answer(first, opened(first, prompt))
    first.flush(10)
    one = saving(tmp_path)
    both = [opened(one, prompt), opened(one, prompt)]
    for request in both:
        read(one, request)
        assert request.num_cached == 192
    assert answer(one, both[0]) == answer(one, both[1])
    one.check()
    assert one.num_pages_free == one.num_pages


def test_a_request_that_leaves_while_it_loads_gives_all_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceModel, "_part_s", 0.0)
    first, prompt = saving(tmp_path), tokens(200, 1)
    answer(first, opened(first, prompt))
    first.flush(10)
    one = saving(tmp_path)
    leaving = opened(one, prompt)
    assert one.read(leaving) is None
    assert leaving.num_read == 32, "a part of a prompt is left after its time"
    one.free(leaving)
    one.check()
    assert one.num_pages_free == one.num_pages


def test_a_damaged_chunk_is_read_again(tmp_path: Path) -> None:
    first, prompt = saving(tmp_path), tokens(200, 1)
    wanted = answer(first, opened(first, prompt))
    first.flush(10)
    links = list(chunk_links(prompt[start : start + 32] for start in range(0, 192, 32)))
    (file,) = tmp_path.glob(f"*/*-{links[2].key.hex()}.kv")
    content = bytearray(file.read_bytes())
    content[-100] ^= 8
    file.write_bytes(content)
    one = saving(tmp_path)
    running = opened(one, prompt)
    assert answer(one, running) == wanted
    assert running.num_cached == 64
    assert counts(one).damaged == 1
    one.check()
    one.flush(10)
    assert counts(one).saved == 32, "it is written anew"


def test_scores_read_everything(tmp_path: Path) -> None:
    first, prompt = saving(tmp_path), tokens(200, 1)
    answer(first, opened(first, prompt))
    first.flush(10)
    one = saving(tmp_path)
    scored = opened(one, prompt, scores="both", top_logprobs=1)
    read(one, scored)
    assert scored.num_cached == 0
    assert len(scored.prompt_scores or ()) == 199


def test_other_facts_find_nothing(tmp_path: Path) -> None:
    first, prompt = saving(tmp_path, "one"), tokens(100, 1)
    answer(first, opened(first, prompt))
    first.flush(10)
    other = saving(tmp_path, "two")
    running = opened(other, prompt)
    answer(other, running)
    assert running.num_cached == 0
    other.flush(10)
    assert len([f for f in tmp_path.iterdir() if f.is_dir()]) == 2


def test_what_found_no_place_keeps_none_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceModel, "_part_s", 0.0)
    one, prompt = executor(keeps_prefixes=True), tokens(100, 1)
    beside = opened(one, tokens(20, 2), most=3820)
    running = opened(one, prompt)
    assert one._num_free == 52, "one chunk of the prompt fits, and the second does not"
    while running.num_read < 64:
        one.read(running)
    assert one.cached.on_device == 32
    one.free(beside)  # there is room again, behind a chunk that is not cached
    answer(one, running)
    one.check()
    skipped = prompt[:32] + prompt[64:96] + tokens(20, 3)
    wanted, fresh = opened(one, skipped), executor()
    assert wanted.num_cached == 32
    assert answer(one, wanted) == answer(fresh, opened(fresh, skipped))


def kernel(root: Path, name: str, **more: bool) -> Parts:
    config = replace(MODELS[name], context_tokens=3072)
    parts = Parts(config, torch.bfloat16, **more)
    pools = [parts.pool.tensor]
    parts.executor.save_in(ChunkFolder(root, b"k" * 16), MOST, PageCopies(pools))
    return parts


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("name", ["gqa-tied", "windows"])
def test_pages_go_on_with_the_bits(tmp_path: Path, name: str, has_host: bool) -> None:
    rng = random.Random(0)
    stem = [rng.randrange(61) for _ in range(2900)]
    first = kernel(tmp_path, name, has_host=has_host)
    first.read(stem)
    first.executor.flush(10)
    saved = first.executor.saved
    assert saved is not None
    assert saved.saved == 2560, "chunks of 512 tokens from position 2,048 on"
    later = kernel(tmp_path, name, has_host=has_host)
    for shared, more, cached in [(1900, 40, 1792), (300, 700, 256), (2870, 1, 2560), (255, 9, 0)]:
        prompt = stem[:shared] + [rng.randrange(61) for _ in range(more)]
        logits, pages, num_cached = kernel(tmp_path / "none", name).read(prompt)
        assert num_cached == 0
        later_logits, later_pages, num_cached = later.read(prompt)
        assert num_cached == cached
        assert torch.equal(logits, later_logits)
        assert torch.equal(pages, later_pages)
        later.executor.check()
    saved = later.executor.saved
    assert saved is not None
    assert saved.loaded >= 2560
    # What the memory has, or the host, is not looked for again.
    assert saved.loaded < 2 * 2560


def test_what_memory_forgot_files_have(tmp_path: Path) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(61) for _ in range(1000)]
    one = kernel(tmp_path, "gqa-tied", has_host=True)
    logits, pages, _ = one.read(prompt)
    one.executor.flush(10)
    one.executor.forget()
    one.executor.check()
    assert one.executor.cached.on_device == one.executor.cached.on_host == 0
    assert one.executor.num_pages_free == one.executor.num_pages
    assert one.executor.tiers.pages.num_free == one.executor.num_pages
    one.pool.tensor.fill_(float("nan"))
    again, pages_again, num_cached = one.read(prompt)
    assert num_cached == 768
    assert torch.equal(pages[:12], pages_again[:12])
    assert torch.equal(logits, again)


def test_ranks_have_their_parts_of_a_chunk() -> None:
    pools = [torch.randn(6, 2, 3, 4).to(torch.bfloat16) for _ in range(2)]
    one, other = PageCopies(pools), PageCopies([torch.zeros_like(pool) for pool in pools])
    source = one.download([4, 1])
    assert source is not None
    data = b"".join(source())
    assert len(data) == one.bytes_of(128) == 2 * 2 * 24 * 2
    buffer = other.buffer(len(data))
    buffer[:] = data
    other.upload(buffer, [0, 5])
    for pool, copied in zip(pools, other._pools, strict=True):
        assert torch.equal(copied[[0, 5]], pool.flatten(1)[[4, 1]])
        assert not copied[1:5].any()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"cache_dir_bytes": 5}, "only with a folder"),
        ({"cache_dir": Path("x"), "keeps_prefixes": False}, "without the prefix cache"),
        ({"cache_dir": Path("x"), "cache_dir_bytes": 0}, "more than 0 GB"),
    ],
)
def test_settings_without_effect_are_refused(asked: dict, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        cache_dir_bytes(EngineConfig(**{"keeps_prefixes": True} | asked))
    assert cache_dir_bytes(EngineConfig()) == 0


def test_a_folder_that_cannot_be_written_is_refused_before_weights_are_read(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        asked = EngineConfig("nothing", cache_dir=place, keeps_prefixes=True)
        with pytest.raises(SettingError, match="a folder that can be written"):
            Engine.load(asked)
