"""A KV cache in 8 and 4 bits on the reference: less memory, and the bits that any cache keeps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interpreter.models import gpu
from plan.shapes import SMALL
from soloist.engine.config import EngineConfig, Resolved, resolve
from soloist.engine.identity import facts_of
from soloist.engine.memory import Footprint, MemoryEstimate
from soloist.engine.reference import ReferenceModel
from soloist.engine.support import support_of
from soloist.kv.memory import kv_bytes_per_token
from soloist.kv.offload import HostPages
from soloist.kv.page_copies import PageCopies
from soloist.kv.pool import PagePool
from soloist.model.config import Attention
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.families.dense import decoder_tensors
from soloist.model.kv_format import KV_FORMATS, KvName, kv_format, plain
from soloist.reference.build import build_reference
from unit.engine.test_reference import answer, opened, read, tokens
from unit.prefill.models import model, random_weights

CONFIG = model(
    *[Attention(4, 2, 64), replace(Attention(4, 2, 64), window=50)] * 2, context_tokens=4000
)
NAMES = pytest.mark.parametrize("name", KV_FORMATS)


def executor(name: KvName | None, *, keeps_prefixes: bool = False) -> ReferenceModel:
    torch.set_num_threads(1)
    return ReferenceModel(
        CONFIG, random_weights(CONFIG), 4000, 3, 32,
        keeps_prefixes=keeps_prefixes, kv=kv_format(name, CONFIG, Dtype.FP32),
    )  # fmt: skip


def stored(one: ReferenceModel, request: object, stop: int) -> list[torch.Tensor]:
    cache = one._open[request].cache  # type: ignore[index]
    return [x.clone() for i in range(cache.num_blocks) for x in cache.stored(i, 0, stop)]


def require_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@NAMES
def test_a_kept_prompt_has_the_bits_of_a_new_one(name: KvName) -> None:
    stem = tokens(200, 1)
    one = executor(name, keeps_prefixes=True)
    answer(one, opened(one, stem))
    for shared in (150, 199, 5):
        prompt = stem[:shared] + tokens(60, shared)
        hit, fresh = opened(one, prompt), executor(name)
        miss = opened(fresh, prompt)
        assert hit.num_cached == shared // 32 * 32
        read(one, hit)
        read(fresh, miss)
        require_same(stored(one, hit, len(prompt)), stored(fresh, miss, len(prompt)))
        assert answer(one, hit) == answer(fresh, miss)
        one.check()


@NAMES
def test_a_saved_prompt_has_the_bits_of_a_new_one(name: KvName, tmp_path: Path) -> None:
    def saving() -> ReferenceModel:
        made = executor(name, keeps_prefixes=True)
        made.save_to(tmp_path, 10**9, (name,))
        return made

    stem = tokens(200, 1)
    first = saving()
    answer(first, opened(first, stem))
    first.flush(10)
    prompt = stem[:150] + tokens(60, 2)
    one, fresh = saving(), executor(name)
    hit, miss = opened(one, prompt), opened(fresh, prompt)
    read(one, hit)
    read(fresh, miss)
    assert hit.num_cached == 128
    require_same(stored(one, hit, len(prompt)), stored(fresh, miss, len(prompt)))
    assert answer(one, hit) == answer(fresh, miss)


@NAMES
def test_tokens_of_one_step_have_the_bits_of_steps_of_their_own(name: KvName) -> None:
    torch.set_num_threads(1)
    kv = kv_format(name, CONFIG, Dtype.FP32)
    reference = build_reference(CONFIG, random_weights(CONFIG), kv)
    ids = torch.randint(CONFIG.vocab_size, (80,), generator=torch.Generator().manual_seed(0))
    for count in (2, 5, 8):
        single, several = reference.new_cache(80), reference.new_cache(80)
        for cache in (single, several):
            reference.forward(ids[:60], 0, cache, "none")
        wanted = [
            reference.forward(ids[i : i + 1], i, single).clone() for i in range(60, 60 + count)
        ]
        found = reference.forward(ids[60 : 60 + count], 60, several, "all", by_rows=True)
        assert torch.equal(found, torch.cat(wanted))


@NAMES
def test_the_latest_position_is_seen_as_it_is_stored(name: KvName) -> None:
    """Otherwise a text read at once would have other bits than the same in two parts."""
    kv = kv_format(name, CONFIG, Dtype.FP32)
    reference = build_reference(CONFIG, random_weights(CONFIG), kv)
    cache = reference.new_cache(8)
    exact = build_reference(CONFIG, random_weights(CONFIG))
    exact_cache = exact.new_cache(8)
    ids = torch.tensor([3])
    rounded, right = reference.forward(ids, 0, cache), exact.forward(ids, 0, exact_cache)
    assert not torch.equal(rounded, right), "the only position's values were rounded"
    keys, values = cache.view(0, 0, 1)
    exact_keys, exact_values = exact_cache.view(0, 0, 1)
    for found, wanted in ((keys, exact_keys), (values, exact_values)):
        assert 0 < (found - wanted).abs().max() < wanted.abs().max() / 8


@NAMES
def test_threads_and_parts_in_time_change_no_bit(
    name: KvName, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, seen = tokens(300, 4), []
    for num_threads, part_s in ((1, 60.0), (1, 0.0), (2, 60.0)):
        monkeypatch.setattr(ReferenceModel, "_part_s", part_s)
        one = executor(name)
        torch.set_num_threads(num_threads)
        running = opened(one, prompt)
        read(one, running)
        seen.append((stored(one, running, 300), answer(one, running)))
    torch.set_num_threads(1)
    for other in seen[1:]:
        require_same(other[0], seen[0][0])
        assert other[1] == seen[0][1]


@NAMES
def test_columns_of_codes_are_not_drafted(name: KvName) -> None:
    made = ReferenceModel(
        CONFIG, random_weights(CONFIG), 600, drafts=True, kv=kv_format(name, CONFIG, Dtype.FP32)
    )
    assert made.drafting is None


def resolved(name: KvName | None, available_bytes: int = 10**10, device: str = "cpu") -> Resolved:
    asked = EngineConfig(kv=name, sequences=3)
    return resolve(
        asked, CONFIG, lambda _: decoder_tensors(CONFIG), Dtype.BF16, device, available_bytes
    )


@pytest.mark.parametrize(("name", "token_bytes"), [("int8", 66), ("fp8", 66), ("int4", 36)])
def test_memory_is_that_of_codes_and_scales(name: KvName, token_bytes: int) -> None:
    kv = kv_format(name, CONFIG, Dtype.FP32)
    a_token = 2 * 4 * 2 * token_bytes  # keys and values, layers, heads
    assert kv_bytes_per_token(CONFIG, kv) == a_token
    cache = build_reference(CONFIG, random_weights(CONFIG), kv).new_cache(100)
    assert cache.num_bytes == 100 * a_token
    found = resolved(name)
    assert found.memory.kv_bytes == found.kv_tokens * a_token
    assert found.kv == kv
    exact = resolved(None)
    assert exact.kv == plain(Dtype.FP32)
    assert exact.memory.kv_bytes == exact.kv_tokens * kv_bytes_per_token(CONFIG, exact.kv)
    # While it attends, a layer's numbers are there as well.
    a_layer = 2 * 4000 * 2 * 64 * 4
    assert found.memory.scratch_bytes - exact.memory.scratch_bytes >= 4 * a_layer


@NAMES
def test_on_a_gpu_the_kernels_pages_are_counted(name: KvName) -> None:
    """And so are host copies, by a page's bytes."""
    assert resolved(None, device="cuda:0").kv == plain(Dtype.BF16)
    assert resolved(name, device="cuda:0").kv == kv_format(name, CONFIG, Dtype.BF16)
    kv = kv_format(name, SMALL, Dtype.BF16)
    plan = support_of(gpu(13), SMALL, Dtype.BF16, kv=kv).plan
    assert plan is not None
    needs = Footprint(SMALL, tensors(SMALL), Dtype.BF16, plan, kv=kv).estimate(3 * 64)
    shape = plan.shape
    pool = PagePool(
        shape.num_layers, shape.pool_kv_heads, shape.head_dim, 3, torch.bfloat16,
        torch.device("cpu"), kv,
    )  # fmt: skip
    assert needs.kv_bytes == pool.tensor.numel()
    pool.fill()
    before, host = pool.tensor.clone(), HostPages(pool.tensor, 2**27)
    assert host.offload([2, 0], [0, 1])
    pool.tensor.zero_()
    host.fetch([0, 1], [0, 2])
    host.join()
    assert torch.equal(pool.tensor[[0, 2]], before[[2, 0]])
    copies = PageCopies([pool.tensor])
    assert copies.bytes_of(128) == 2 * pool.tensor.shape[1:].numel()


def test_saved_prompts_of_another_format_are_others(tmp_path: Path) -> None:
    facts = {
        kv.name: facts_of(
            tmp_path, tmp_path, [], CONFIG,
            Resolved("cpu", Dtype.FP32, 10, MemoryEstimate(0, 0, 0), 10, kv),
        )
        for kv in (plain(Dtype.FP32), *(kv_format(n, CONFIG, Dtype.FP32) for n in KV_FORMATS))
    }  # fmt: skip
    assert len(set(map(repr, facts.values()))) == 4
