"""Prompts from a folder, in pages of the GPU: the bits of reading them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.engine import Completion, Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.sampling import Sampler, SamplingParams
from unit.engine.fakes import opened

pytestmark = pytest.mark.gpu

TEXT = "def f(x):\n    return x + 1\n\n" * 250


def load(root: Path | None, **more: Any) -> Engine:
    asked = EngineConfig(
        "etude", device="cuda", context_tokens=4096, sequences=2, keeps_prefixes=True,
        cache_dir=root, **more,
    )  # fmt: skip
    engine = Engine.load(asked)
    assert isinstance(engine.model, KernelModel)
    return engine


def answered(engine: Engine, text: str = TEXT) -> Completion:
    *_, end = engine.generate(text, SamplingParams(max_tokens=64, ignore_eos=True))
    assert isinstance(end, Completion)
    engine.model.flush(20)
    return end


@pytest.mark.parametrize("ranks", [(), (0, 0)])
def test_a_later_engine_has_the_bits(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    wanted = answered(load(None, rank_devices=ranks))
    first = load(tmp_path, rank_devices=ranks)
    assert answered(first).text == wanted.text
    later = load(tmp_path, rank_devices=ranks)
    end = answered(later)
    assert end.timings.cached_tokens >= end.timings.prompt_tokens // 512 * 512 - 512 > 0
    assert end.text == wanted.text
    later.model.check()


def test_pages_are_the_same(tmp_path: Path) -> None:
    pages = []
    for root in (None, tmp_path, tmp_path):
        engine = load(root)
        model, prompt = engine.model, engine.tokenizer.encode(TEXT)
        assert isinstance(model, KernelModel)
        sampler = Sampler(SamplingParams(max_tokens=8), engine.config.vocab_size, prompt, ())
        request = opened(model, prompt, sampler)
        assert request is not None
        while model.read(request) is None:
            pass
        torch.cuda.synchronize()
        held = model.allocation_of(request).pages[: len(prompt) // 64]
        pages.append(model.pools[0].tensor[held].cpu())
        model.free(request)
        model.flush(20)
        model.check()
    assert model.saved is not None
    assert model.saved.loaded > 0
    assert torch.equal(pages[0], pages[1])
    assert torch.equal(pages[0], pages[2])


def test_pages_that_are_being_saved_are_not_overwritten(tmp_path: Path) -> None:
    first = load(tmp_path, host_cache_bytes=0)
    texts = [f"# {n}\n" + TEXT for n in range(12)]  # more than the pool holds
    for text in texts:
        list(first.generate(text, SamplingParams(max_tokens=2, ignore_eos=True)))
    first.model.flush(60)
    later, plain = load(tmp_path, host_cache_bytes=0), load(None)
    for text in texts:
        end = answered(later, text)
        assert end.text == answered(plain, text).text
    assert later.model.saved is not None
    assert later.model.saved.loaded > 0
    assert later.model.saved.damaged == 0
