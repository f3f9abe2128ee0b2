"""Ends of prompts on a GPU, in passes and in rounds: what was kept of a prompt changes no bit."""

import itertools

import pytest
import torch
from torch import Tensor

from plan.shapes import SHAPES
from soloist.bench.subject import Reading, rounded_shape, shape_on_gpu, shape_placement
from soloist.engine.kernel import KernelModel
from soloist.engine.request import Request
from soloist.engine.tail_path import TailPath
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.sampling import Sampler, SamplingParams

pytestmark = pytest.mark.gpu

CONTEXT = 8192
NAME = "llama-3.2-1b"
# Tails of 1, 8, 9, 44, 150 and 255 tokens, and of a whole chunk.
LENGTHS = (1025, 1032, 1289, 2348, 4246, 5375, 2048)
SOME = SamplingParams(max_tokens=4, ignore_eos=True)
# Relative error of logits: both ways round what they compute in other places.
MOST_DIFFERENCE = 0.03


def load(path: TailPath, *, page_attention: bool) -> KernelModel:
    config = read_config(SHAPES[NAME])
    placed = shape_placement(SHAPES[NAME], "bf16", torch.device("cuda"), "cuda", 1)
    return shape_on_gpu(
        rounded_shape(config, Dtype.BF16), CONTEXT, placed, 2, keeps_prefixes=True,
        reading=Reading(page_attention=page_attention, tail_path=path),
    )  # fmt: skip


def prompt_of(tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    vocab_size = read_config(SHAPES[NAME]).vocab_size
    return torch.randint(vocab_size, (tokens,), generator=generator).tolist()


def read(model: KernelModel, prompt: list[int]) -> tuple[list[int], Tensor, int]:
    """Tokens of the answer, the prompt's pages but the last one, and tokens that were cached."""
    vocab_size = model.plan.model.vocab_size
    request = Request(prompt, Sampler(SOME, vocab_size, prompt))
    assert model.open(request)
    while not request.is_read:
        assert model.reserve([request])
        model.read(request)
    while not request.has_all_tokens:
        assert model.reserve([request])
        for _ in model.rounds([request], 4):
            pass
    model.synchronize()
    pages = model.allocation_of(request).pages[: len(prompt) // 64]
    held = model.pools[0].tensor[pages].clone()
    model.free(request)
    model.check()
    return list(request.sampler.output_ids), held, request.num_cached


def skip_without_the_kernel(*, page_attention: bool) -> None:
    if page_attention and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("page_attention", [False, True], ids=["gathered", "pages"])
@pytest.mark.parametrize("path", ["prefill", "decode", "auto"])
def test_what_was_kept_changes_no_bit(path: TailPath, page_attention: bool) -> None:
    skip_without_the_kernel(page_attention=page_attention)
    model = load(path, page_attention=page_attention)
    for seed, tokens in enumerate(LENGTHS):
        prompt = prompt_of(tokens, seed)
        model.forget()
        cold = read(model, prompt)
        assert cold[2] == 0
        boundary = (tokens - 1) // 256 * 256
        for kept in (256, boundary - 256, boundary, tokens):
            model.forget()
            read(model, prompt[:kept])
            answer, held, num_cached = read(model, prompt)
            # What rounds read is not kept, not even a whole chunk at a prompt's end.
            of_passes = (kept - 1) // 256 * 256 if path == "decode" and kept > 256 else kept
            assert num_cached == min(of_passes, boundary) // 256 * 256
            assert answer == cold[0], (tokens, kept)
            assert torch.equal(held, cold[1]), (tokens, kept)


@pytest.mark.parametrize("page_attention", [False, True], ids=["gathered", "pages"])
def test_both_ways_are_near(page_attention: bool) -> None:
    """Keys and values of the tail, whose tokens have gone through all layers."""
    skip_without_the_kernel(page_attention=page_attention)
    found = []
    for path in ("prefill", "decode"):
        model = load(path, page_attention=page_attention)
        found.append([read(model, prompt_of(n, n))[1] for n in (1024 + 128, 4096 + 192)])
        del model
        torch.cuda.empty_cache()
    for passed, by_rounds in zip(*found, strict=True):
        whole = len(passed) // 4 * 4
        assert torch.equal(passed[:whole], by_rounds[:whole]), "passes read what is kept"
        assert not torch.equal(passed[whole:], by_rounds[whole:]), "another way has other bits"
        seen, wanted = by_rounds[whole:].float(), passed[whole:].float()
        assert (seen - wanted).norm() <= MOST_DIFFERENCE * wanted.norm()


def test_auto_takes_rounds_for_few_tokens_on_a_long_context() -> None:
    model = load("auto", page_attention=False)
    if model.tails.costs is None:
        pytest.skip("no figures were measured on this GPU")
    chunks = model.chunks
    ways = [model.tails.rounds_from(n, chunks.last_boundary(n)) for n in (4096 + 8, 4096 + 200)]
    assert ways == [4096, 4096 + 200]


@pytest.mark.parametrize("page_attention", [False, True], ids=["gathered", "pages"])
def test_narrow_widths_have_graphs_that_give_the_bits_of_launches(page_attention: bool) -> None:
    skip_without_the_kernel(page_attention=page_attention)
    model = load("prefill", page_attention=page_attention)
    (part,) = model.prefill.parts
    narrow = [w for w in model.prefill.widths if w < 256]
    if not narrow:
        pytest.skip("narrow passes have other bits here, so there are none")
    for width, (seed, boundary) in itertools.product(narrow, enumerate((256, 4096))):
        assert width in part.graphs.by_rows
        prompt = prompt_of(boundary + width - 3, seed)
        ids, pages = prompt[boundary:], model.page_tables[0]
        model.prefill.run_prompt(prompt[:boundary], pages, 2048, lambda: False)
        chunk = part.placed(ids, boundary, pages, want_logits=True)
        assert chunk.num_rows == width
        assert part.has_graph(chunk)
        recorded = model.prefill.run(ids, boundary, pages)
        assert recorded is not None
        recorded = recorded.clone()
        vars(part)["has_graph"] = lambda _: False
        launched = model.prefill.run(ids, boundary, pages)
        del vars(part)["has_graph"]
        assert launched is not None
        assert torch.equal(recorded, launched), (width, boundary)
