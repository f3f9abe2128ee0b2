"""Prefill against the reference: logits and what lies in the pool, however a prompt is cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from soloist.errors import ShapeUnsupported
from soloist.kv.memory import kv_bytes_per_token
from soloist.kv.pool import PagePool
from soloist.model.config import Attention, Lanes, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import plain
from soloist.model.rope import Rope, YarnScaling
from soloist.parallel.share import Share
from soloist.prefill import chunk_attention, settling
from soloist.prefill.attention import attend
from soloist.prefill.elementwise import Chunk, TorchElementwise
from soloist.prefill.part import Part, require_prefill
from soloist.prefill.products import Factor, Products
from soloist.prefill.runner import Prefill
from soloist.prefill.widths import Widths
from soloist.reference.build import build_reference
from soloist.weights.sharding import shard_all
from unit.prefill.models import GQA, MODELS, matrices, model, random_weights, vectors

CPU = torch.device("cpu")
SCATTERED = [5, 0, 3, 1]
SCATTERED_WIDE = [5, 0, 3, 1, 4, 2]
TOKENS = 200
CUTS = {
    "one": [0, 200],
    "half_pages": [0, 32, 96, 128, 200],
    "uneven": [0, 1, 30, 65, 66, 190, 200],
    "pages": [0, 64, 128, 192, 200],
}


def prefill(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Prefill:
    weights = shard_all(Share(config, 1, 0), random_weights(config, seed))
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 6, dtype, CPU)
    held = matrices(weights, dtype)
    part = Part(Share(config, 1, 0), held.__getitem__, vectors(weights), pool, most_tokens=256)
    return Prefill([part])


def prompt(config: ModelConfig, num_tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (num_tokens,), generator=generator)


def reference_logits(config: ModelConfig, ids: Tensor) -> Tensor:
    """[T, V]."""
    reference = build_reference(config, random_weights(config))
    logits = reference.forward(ids, 0, reference.new_cache(len(ids)), "all")
    assert logits is not None
    return logits


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[ModelConfig, Tensor]:
    config = MODELS[request.param]
    return config, reference_logits(config, prompt(config))


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_logits_are_the_references(case: tuple[ModelConfig, Tensor], cuts: list[int]) -> None:
    config, wanted = case
    run, ids = prefill(config), prompt(config)
    for start, stop in pairwise(cuts):
        logits = run.run(ids[start:stop], start, SCATTERED)
        assert logits is not None
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.75, 0.25])
def test_any_pairs_and_any_share_of_a_head_may_turn(interleaved: bool, share: float) -> None:
    attention = replace(GQA, qk_norm=True, qkv_bias=True)
    config = model(attention, attention, rope=Rope(1000.0, None, interleaved, share))
    ids = prompt(config)
    run, wanted = prefill(config), reference_logits(config, ids)
    for start, stop in pairwise(CUTS["uneven"]):
        logits = run.run(ids[start:stop], start, SCATTERED)
        torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=2e-5)


def test_a_prompt_in_silent_chunks(case: tuple[ModelConfig, Tensor]) -> None:
    config, wanted = case
    logits = prefill(config).run_prompt(prompt(config), SCATTERED, 70, lambda: False)
    torch.testing.assert_close(logits, wanted[-1], rtol=0, atol=2e-5)


def test_a_longer_prompt_of_a_kept_sequence() -> None:
    config = MODELS["windows"]
    run, ids = prefill(config), prompt(config)
    run.run_prompt(ids[:90], SCATTERED, 40, lambda: False)
    logits = run.run_prompt(ids[90:], SCATTERED, 64, lambda: False, position=90)
    wanted = reference_logits(config, ids)[-1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


def test_silent_chunks_store_what_others_store() -> None:
    config = MODELS["qwen3"]
    silent, spoken = prefill(config), prefill(config)
    assert silent.run(prompt(config), 0, SCATTERED, want_logits=False) is None
    spoken.run(prompt(config), 0, SCATTERED)
    stored = silent.parts[0].pool.tensor
    assert torch.equal(stored, spoken.parts[0].pool.tensor)
    assert stored[[5, 0, 3, 1]].abs().amax((1, 2, 3, 4, 5)).min() > 0
    assert not stored[[2, 4]].any()


def test_scaled_rope() -> None:
    rope = Rope(1000.0, YarnScaling(4.0, 64, 32.0, 1.0, 1.2, truncate=True))
    config = model(GQA, GQA, rope=rope)
    logits = prefill(config).run(prompt(config), 0, SCATTERED)
    wanted = reference_logits(config, prompt(config))[-1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancelling_between_chunks(after: int) -> None:
    config = MODELS["mha"]
    run = prefill(config)
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > after

    assert run.run_prompt(prompt(config), SCATTERED, 64, cancelled) is None
    stored = run.parts[0].pool.tensor.abs().amax((1, 2, 3, 4, 5)) > 0
    assert stored.nonzero().flatten().tolist() == sorted(SCATTERED[:after])


@pytest.mark.parametrize("name", MODELS)
def test_passes_of_settled_widths_are_the_references(name: str) -> None:
    """On the CPU their bits may differ; that padding and gathered keys change nothing shows."""
    config = replace(MODELS[name], context_tokens=1024)
    weights, ids = random_weights(config), prompt(config, 900)
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 20, torch.float32, CPU)
    held = matrices(weights, torch.float32)
    part = Part(Share(config, 1, 0), held.__getitem__, vectors(weights), pool, most_tokens=1024)
    run, before = Prefill([part]), part.num_bytes
    part.take_widths(Widths((256, 512, 768), {("down", 256): 512, ("qkv", 256): 768}))
    assert part.most_tokens == 768
    # The estimate counts three times as much for what is gathered.
    kv_bytes = kv_bytes_per_token(config, plain(Dtype.FP32)) * 1024
    assert part.num_bytes - before == kv_bytes // config.num_layers
    pages = [7, 3, 1, 0, 2, 5, 4, 6, 19, 18, 17, 16, 15, 14, 13]
    wanted = reference_logits(config, ids)
    for cuts in ([0, 100], [0, 256, 900], [0, 700], [0, 512, 768, 900], [0, 300, 900]):
        pool.tensor.fill_(torch.nan)
        for start, stop in pairwise(cuts):
            logits = run.run(ids[start:stop], start, pages)
            torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=3e-5)
        stored = ~pool.tensor.isnan().view(20, -1).all(1)
        assert set(stored.nonzero().flatten().tolist()) == set(pages[: -(-stop // 64)])


@pytest.mark.parametrize("reach", [256, 10_000])
def test_beyond_the_reach_of_graphs_keys_are_gathered_elsewhere(
    monkeypatch: pytest.MonkeyPatch, reach: int
) -> None:
    monkeypatch.setattr(chunk_attention, "REACH_TOKENS", reach)
    config = MODELS["windows"]
    run, ids = prefill(config), prompt(config, 380)
    run.parts[0].take_widths(Widths((256,)))
    for start, stop in ((0, 256), (256, 380)):
        logits = run.run(ids[start:stop], start, SCATTERED_WIDE)
    wanted = reference_logits(config, ids)[-1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=3e-5)


class AttendsPages(TorchElementwise):
    """As a kernel does that finds in pages what a pass attends to, by what the device knows."""

    attends_pages = True

    def attend_pages(
        self, layer: int, chunk: Chunk, queries: Tensor, query_bounds: Tensor,
        *, arranged: bool = False,
    ) -> Tensor:  # fmt: skip
        assert not arranged, "libraries take their order"
        count, stop = int(query_bounds[1]), int(chunk.key_bounds[1])
        keys, values = (x.transpose(0, 1) for x in self.pool.read(layer, chunk.page_table, 0, stop))
        window = self.config.layers[layer].attention.window
        out = torch.full_like(queries, torch.nan).flatten(1)
        out[:count] = attend(queries[:count], keys, values, window)
        return out


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", ["windows", "qwen3", "head-128"])
def test_where_passes_attend_to_pages_nothing_is_gathered(name: str, cuts: list[int]) -> None:
    """Neither of a first pass nor of a later one, with rows to spare or without."""
    config, ids = MODELS[name], prompt(MODELS[name])
    wanted = reference_logits(config, ids)
    for widths in (None, Widths((256,))):
        weights = shard_all(Share(config, 1, 0), random_weights(config))
        a = config.layers[0].attention
        pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 6, torch.float32, CPU)
        held = matrices(weights, torch.float32)
        part = Part(
            Share(config, 1, 0), held.__getitem__, vectors(weights), pool, AttendsPages, 256
        )
        if widths is not None:
            part.take_widths(widths)
        run = Prefill([part])
        for start, stop in pairwise(cuts):
            logits = run.run(ids[start:stop], start, SCATTERED)
            torch.testing.assert_close(logits, wanted[stop - 1], rtol=0, atol=2e-5)
        chunk = part.placed(ids[:3], 190, SCATTERED, want_logits=True)
        part.graphs.by_rows[chunk.num_rows] = []
        assert part.has_graph(chunk), "a recorded pass serves every position"


def test_short_prompts_have_graphs_of_their_own() -> None:
    """Of 128 rows there may be two: a later pass may multiply more rows, and gathers its keys."""
    run = prefill(replace(MODELS["gqa-tied"], context_tokens=1024))
    part, ids = run.parts[0], prompt(MODELS["gqa-tied"], 300)
    part.take_widths(Widths((128, 192, 256), {("down", 128): 256}))
    asked = ((100, 0), (100, 256), (129, 0), (150, 192))

    def placed(tokens: int, position: int) -> Chunk:
        return part.placed(ids[:tokens], position, [*range(8)], want_logits=True)

    assert [placed(*one).num_rows for one in asked] == [128, 128, 192, 192]
    assert not any(placed(*one).is_short_prompt for one in asked)
    part.graphs.by_rows = {128: [], 192: [], 256: []}
    part.graphs.of_short_prompts = {32: [], 64: [], 128: [], 256: []}
    seen = {one: placed(*one) for one in [*asked, (20, 0), (200, 0), (256, 0), (20, 256)]}
    short = {one: chunk.num_rows for one, chunk in seen.items() if chunk.is_short_prompt}
    assert short == {(100, 0): 128, (20, 0): 32, (200, 0): 256}
    others = {one: chunk.num_rows for one, chunk in seen.items() if not chunk.is_short_prompt}
    assert others == {
        (100, 256): 128, (129, 0): 192, (150, 192): 192, (256, 0): 256, (20, 256): 128,
    }  # fmt: skip
    assert all(part.has_graph(chunk) for chunk in seen.values())
    silent = part.placed(ids[:100], 0, SCATTERED_WIDE, want_logits=False)
    assert not silent.is_short_prompt, "more tokens follow"
    part.graphs.by_rows = {}
    assert [part.has_graph(chunk) for chunk in seen.values()] == [
        chunk.is_short_prompt for chunk in seen.values()
    ]


def test_only_passes_that_must_not_depend_on_their_width_multiply_more_rows() -> None:
    config = replace(MODELS["gqa-tied"], context_tokens=1024)
    run, ids = prefill(config), prompt(config, 300)
    part, wanted = run.parts[0], reference_logits(config, ids)
    part.take_widths(Widths((128, 256), {("down", 128): 256, ("attention_output", 128): 256}))
    run.run(ids[:256], 0, SCATTERED_WIDE)
    part.graphs.of_short_prompts = {64: []}
    for tokens, position, pads in ((20, 280, True), (20, 0, False)):
        if position:
            run.run(ids[256:280], 256, SCATTERED_WIDE)
        chunk = part.placed(
            ids[position : position + tokens], position, SCATTERED_WIDE, want_logits=True
        )
        for _ in part.stages(chunk, want_logits=True):
            pass
        assert part.work.products.pads is pads
        rows = {part.work.products.num_rows(f"layers.0.{name}", 128) for name in ("down", "qkv")}
        assert rows == ({128, 256} if pads else {128})
        logits = wanted[position + tokens - 1]
        torch.testing.assert_close(part.logits, logits, rtol=0, atol=3e-5)


class RowByRow(Products):
    """As with libraries, a row's bits depend on how many rows a product has."""

    def multiply(self, x: Factor, name: str, out: Tensor, first: int = 0) -> None:
        assert isinstance(x, Tensor)
        x, out = self.lengthened(name, x, out)
        matrix = self.matrix(name)[first:]
        halves = (name.rpartition(".")[2], len(x)) in {("down", 256), ("attention_output", 128)}
        cuts = (0, x.shape[1] // 2, x.shape[1]) if halves else (0, x.shape[1])
        for row, into in zip(x, out[:, first:], strict=True):
            into.copy_(sum(matrix[:, a:b] @ row[a:b] for a, b in pairwise(cuts)))


class AttendsRowByRow(AttendsPages):
    def attend_pages(
        self, layer: int, chunk: Chunk, queries: Tensor, query_bounds: Tensor,
        *, arranged: bool = False,
    ) -> Tensor:  # fmt: skip
        assert not arranged, "libraries take their order"
        out = torch.zeros_like(queries).flatten(1)
        first = chunk.stop - int(query_bounds[1])
        for i in range(int(query_bounds[1])):
            pages, stop = chunk.page_table, first + i + 1
            keys, values = (x.transpose(0, 1) for x in self.pool.read(layer, pages, 0, stop))
            window = self.config.layers[layer].attention.window
            out[i] = attend(queries[i : i + 1], keys, values, window)
        return out


@pytest.mark.parametrize("is_padded", [True, False])
def test_short_ends_have_the_bits_of_wide_passes(is_padded: bool) -> None:
    """Where each product has as many rows as it takes; otherwise not."""
    config = replace(MODELS["qwen3"], context_tokens=1024)
    weights, ids = random_weights(config), prompt(config, 690)
    a = config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 11, torch.float32, CPU)
    products = RowByRow(matrices(weights, torch.float32).__getitem__)
    part = Part(
        Share(config, 1, 0), products, vectors(weights), pool, AttendsRowByRow, most_tokens=768
    )
    run = Prefill([part])
    padded = {("down", 256): 384, ("attention_output", 128): 192}
    part.take_widths(Widths((128, 192, 256, 384, 768), padded if is_padded else {}))
    found = []
    for tokens, ways in {
        600: ([0, 600], [0, 512, 600], [0, 256, 512, 600]),
        690: ([0, 690], [0, 256, 512, 690]),
        520: ([0, 520], [0, 512, 520]),
    }.items():
        for cuts in ways:
            pool.tensor.zero_()
            for start, stop in pairwise(cuts):
                logits = run.run(ids[start:stop], start, [*range(11)])
            assert logits is not None
            torch.testing.assert_close(
                logits, reference_logits(config, ids[:tokens])[-1], rtol=0, atol=3e-5
            )
            found.append((tokens, logits.clone(), pool.tensor.clone()))
    same = [
        torch.equal(one[1], other[1]) and torch.equal(one[2], other[2])
        for one, other in pairwise(found)
        if one[0] == other[0]
    ]
    assert all(same) if is_padded else not any(same)


def test_widths_are_not_asked_for_where_products_are_not_16_bit_on_a_gpu() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        run = prefill(MODELS["mha"], dtype)
        run.settle_widths()
        assert run.widths == ()


@pytest.mark.parametrize(
    ("name", "sums", "widths"),
    [
        ("down", (), (128, 192, 256, 384, 512, 768)),
        ("attention_output", (256, 384), (128, 192, 256, 384, 512, 768)),
        ("attention_output", (128,), (128, 192, 256, 384, 512, 768)),
        ("down", (256, 384), (128, 192, 256, 384, 512, 768)),
        ("down", (192, 256), (128, 192, 256, 384, 512, 768)),
        ("down", (768,), (128, 192, 256, 384, 512)),
    ],
)
def test_widths_at_which_products_differ_are_refused_or_padded(
    monkeypatch: pytest.MonkeyPatch, name: str, sums: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    """One of the products is summed in halves at some widths."""
    config = replace(MODELS["gqa-tied"], context_tokens=1024)
    weights, a = random_weights(config), config.layers[0].attention
    pool = PagePool(config.num_layers, a.num_kv_heads, a.head_dim, 16, torch.float32, CPU)
    held = matrices(weights, torch.float32)
    part = Part(Share(config, 1, 0), held.__getitem__, vectors(weights), pool, most_tokens=800)
    run = Prefill([part])
    of_matrix = {id(matrix): key.rpartition(".")[2] for key, matrix in held.items()}
    asked: list[tuple[str, int]] = []

    def mm(x: Tensor, matrix: Tensor, *, out: Tensor) -> Tensor:
        short = of_matrix.get(id(matrix._base), "")
        asked.append((short, len(x)))
        for row, into in zip(x.split(64), out.split(64), strict=True):
            halves = zip(row.chunk(2, 1), matrix.chunk(2, 0), strict=True)
            splits = short == name and len(x) in sums
            into.copy_(sum(p @ q for p, q in halves) if splits else row @ matrix)
        return out

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(settling, "attention_is_invariant_at", lambda *_: True)
    monkeypatch.setattr(settling, "tries_widths", lambda _: True)
    run.settle_widths()
    assert run.widths == widths
    ids = prompt(config, 512)
    for tokens, width in ((100, 128), (150, 192), (200, 256)):
        asked.clear()
        logits = run.run(ids[:tokens], 0, SCATTERED_WIDE)
        rows = {(short, count) for short, count in asked if count > 1}
        more = next(w for w in widths if w >= width and w not in sums)
        assert {count for short, count in rows if short == name} == {more}
        assert {count for short, count in rows if short != name} == {width}
        reference = reference_logits(config, ids[:tokens])[-1]
        torch.testing.assert_close(logits, reference, rtol=0, atol=3e-5)
    monkeypatch.setattr(settling, "attention_is_invariant_at", lambda _, passes: passes[0] >= 256)
    run.settle_widths()
    assert run.widths == tuple(w for w in widths if w >= 256), "few queries have another form"
    run.widths = ()
    monkeypatch.setattr(settling, "attention_is_invariant_at", lambda *_: False)
    run.settle_widths()
    assert run.widths == (), "attention has to agree as well"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bits_stay_near(case: tuple[ModelConfig, Tensor], dtype: torch.dtype) -> None:
    config, wanted = case
    logits = prefill(config, dtype).run_prompt(prompt(config), SCATTERED, 70, lambda: False)
    assert logits is not None
    error = (logits - wanted[-1]).norm() / wanted[-1].norm()
    assert error < (0.03 if dtype is torch.bfloat16 else 0.004)


def test_lanes_are_refused() -> None:
    lanes = Lanes(
        2, 1, early_sum=False, attention_comm=True, mlp_comm=True, shared_norm_scales=True,
        head="replicate", sum_before_norm=True,
    )  # fmt: skip
    with pytest.raises(ShapeUnsupported, match="2 lanes"):
        require_prefill(replace(MODELS["mha"], lanes=lanes))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (model(Attention(4, 2, 8), Attention(4, 4, 8)), "layers with different heads"),
        (model(GQA, embedding_scale=2.0), "a scale of embeddings"),
    ],
)
def test_what_kernels_cannot_do_is_refused(config: ModelConfig, named: str) -> None:
    with pytest.raises(ShapeUnsupported, match=named):
        prefill(config)
