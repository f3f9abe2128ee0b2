"""Which widths passes may have: those that agree, and how that is found out."""

import pytest
import torch
from torch import Tensor

from soloist.prefill import invariance
from soloist.prefill.attention import attend, attend_packed
from soloist.prefill.invariance import attention_is_invariant, product_behaviours
from soloist.prefill.widths import batch_invariant_widths, candidate_widths, width_of

WIDTHS = (256, 384, 512, 1024)
LIKE = torch.empty(0)


def test_candidates_are_blocks_and_no_pass_is_padded_by_more_than_half() -> None:
    widths = candidate_widths(2048)
    assert (widths[0], widths[-1]) == (128, 2048)
    for tokens in range(1, 2049):
        assert width_of(tokens, widths) < 1.5 * tokens + 128
    assert candidate_widths(1100) == (128, 192, 256, 384, 512, 768, 1024)
    assert candidate_widths(300) == (), "one width of chunks is no choice"


@pytest.mark.parametrize(
    ("behaviours", "widths"),
    [
        ({256: 0, 512: 0, 1024: 0, 2048: 0}, (256, 512, 1024, 2048)),
        ({256: 0, 512: 1, 1024: 1, 2048: 1}, (512, 1024, 2048)),
        ({256: 0, 512: 0, 1024: 0, 2048: 1}, (256, 512, 1024)),
        ({256: 0, 512: 0, 1024: 1, 2048: 1}, (256, 512)),
        ({256: 0, 512: 1, 1024: 0, 2048: None}, (256, 1024)),
        ({256: 0, 512: 1, 1024: 2, 2048: 3}, ()),
        ({256: None, 512: None, 1024: 0, 2048: 0}, ()),
        ({256: 0, 512: None, 1024: None, 2048: None}, ()),
        ({128: 0, 192: 1, 256: 0, 512: 0}, (128, 256, 512)),
        ({128: 0, 256: 1, 512: 0, 1024: 0}, (128, 512, 1024)),
        ({128: 0, 192: 0, 256: 1, 512: 2, 1024: 0}, ()),
        ({128: 0, 256: 1, 512: 2, 1024: 1, 2048: 0}, (256, 1024)),
        ({128: 0, 192: 0, 1024: 0, 2048: 0}, ()),
        ({}, ()),
    ],
)
def test_the_widths_that_agree_with_the_widest_one(
    behaviours: dict[int, int | None], widths: tuple[int, ...]
) -> None:
    assert passes(behaviours) == widths


def passes(behaviours: dict[int, int | None]) -> tuple[int, ...]:
    """With one product, which cannot be padded."""
    found = batch_invariant_widths({w: {"qkv": seen} for w, seen in behaviours.items()}, ())
    return () if found is None else found.passes


def test_narrower_passes_compute_what_disagrees_on_more_rows() -> None:
    seen = {
        256: {"qkv": 0, "down": 0, "gate_up": None},
        512: {"qkv": 0, "down": 1, "gate_up": 0},
        1024: {"qkv": 0, "down": 1, "gate_up": 0},
        2048: {"qkv": 0, "down": 1, "gate_up": 2},
    }
    widths = batch_invariant_widths(seen, ("down", "gate_up"))
    assert widths.passes == (256, 512, 1024)
    assert widths.products == {("down", 256): 512, ("gate_up", 256): 512}
    widths = batch_invariant_widths(seen, ("down",))
    assert (widths.passes, widths.products) == ((512, 1024), {})
    seen[2048]["gate_up"] = 0
    assert batch_invariant_widths(seen, ("down", "gate_up")).passes == (256, 512, 1024, 2048)
    seen[1024]["down"] = None
    assert batch_invariant_widths(seen, ("down", "gate_up")).passes == (256, 512, 2048)


def test_each_product_is_padded_to_the_next_width_at_which_it_agrees() -> None:
    seen = {
        128: {"qkv": 0, "attention_output": 1, "down": 1},
        192: {"qkv": 2, "attention_output": 0, "down": 2},
        256: {"qkv": 2, "attention_output": 1, "down": 1},
        512: {"qkv": 0, "attention_output": 0, "down": 0},
        1024: {"qkv": 0, "attention_output": 0, "down": 0},
    }
    every = ("qkv", "attention_output", "down")
    widths = batch_invariant_widths(seen, every)
    assert widths.passes == (128, 192, 256, 512, 1024)
    assert widths.products == {
        ("attention_output", 128): 192, ("down", 128): 512,
        ("qkv", 192): 512, ("down", 192): 512,
        ("qkv", 256): 512, ("attention_output", 256): 512, ("down", 256): 512,
    }  # fmt: skip
    assert widths.of_chunks().passes == (256, 512, 1024)
    widths = batch_invariant_widths(seen, ("attention_output", "down"))
    assert widths.passes == (128, 512, 1024), "qkv cannot be padded"
    assert widths.products == {("attention_output", 128): 192, ("down", 128): 512}


def by_rows(x: Tensor) -> Tensor:
    """A product whose bits depend on nothing but the row."""
    return torch.stack([row.cumsum(0)[-8:] for row in x])


def split(x: Tensor) -> Tensor:
    """The same, summed in two halves."""
    half = x.shape[1] // 2
    last = torch.stack([row[half:].cumsum(0)[-8:] for row in x])
    return last + torch.stack([row[:half].cumsum(0)[-1:] for row in x])


def test_products_that_split_their_sums_disagree() -> None:
    seen = product_behaviours(
        lambda x: split(x) if len(x) <= 256 else by_rows(x), 100, WIDTHS, LIKE
    )
    assert passes(seen) == (384, 512, 1024)
    seen = product_behaviours(
        lambda x: split(x) if len(x) >= 1024 else by_rows(x), 100, WIDTHS, LIKE
    )
    assert passes(seen) == (256, 384, 512)
    seen = product_behaviours(by_rows, 100, WIDTHS, LIKE)
    assert passes(seen) == WIDTHS
    short = (128, 192, *WIDTHS)
    assert passes(product_behaviours(by_rows, 100, short, LIKE)) == short
    seen = product_behaviours(
        lambda x: split(x) if len(x) in (192, 256) else by_rows(x), 100, short, LIKE
    )
    assert passes(seen) == (128, 384, 512, 1024)
    assert seen[192] == seen[256]


def test_widths_that_differ_behind_a_short_ones_rows_differ() -> None:
    """The short one agrees with one of them at least; both are not taken for the same."""

    def product(x: Tensor) -> Tensor:
        if len(x) <= 256:
            return by_rows(x)
        is_early = torch.arange(len(x))[:, None] % 256 < 128
        return torch.where(is_early, by_rows(x), split(x))

    seen = product_behaviours(product, 100, (128, *WIDTHS), LIKE)
    assert len({seen[w] for w in WIDTHS}) == 2
    assert seen[256] not in {seen[384], seen[512], seen[1024]}


def test_a_width_whose_rows_differ_by_place_is_none() -> None:
    """Such as of kernels that split the sums of the last tiles only."""

    def product(x: Tensor) -> Tensor:
        return torch.cat([by_rows(x[:-64]), split(x[-64:])]) if len(x) == 1024 else by_rows(x)

    seen = product_behaviours(product, 100, WIDTHS, LIKE)
    assert seen == {1024: None, 512: 0, 384: 0, 256: 0}


def test_zeros_of_both_signs_differ() -> None:
    seen = product_behaviours(lambda x: x * 0 if len(x) > 256 else -x * 0, 4, WIDTHS, LIKE)
    assert seen == {1024: 0, 512: 0, 384: 0, 256: 1}


def exactly(
    queries: Tensor, keys: Tensor, values: Tensor, query_bounds: Tensor, key_bounds: Tensor,
    most_keys: int, window: int | None,
) -> Tensor:  # fmt: skip
    """Attention of one query after the other."""
    del most_keys
    out = torch.zeros(len(queries), queries.shape[1] * queries.shape[2])
    first = int(key_bounds[1] - query_bounds[1])
    for i in range(int(query_bounds[1])):
        stop = first + i + 1
        start = 0 if window is None else max(0, stop - window)
        out[i] = attend(queries[i : i + 1], keys[start:stop], values[start:stop], None)[0]
    return out


@pytest.mark.parametrize("window", [None, 300])
def test_attention_that_splits_keys_disagrees(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    heads, context, widths = (1, 1, 8), 1024, (256, 512)
    monkeypatch.setattr(invariance, "attend_packed", exactly)
    assert attention_is_invariant(heads, window, context, widths, LIKE)

    def by_how_full(queries: Tensor, keys: Tensor, *rest: object) -> Tensor:
        mixed = exactly(queries, keys, *rest)
        return mixed * (1 + 2**-20) if len(queries) < 512 and len(keys) > 700 else mixed

    monkeypatch.setattr(invariance, "attend_packed", by_how_full)
    assert not attention_is_invariant(heads, window, context, widths, LIKE)


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_packed_attention_is_attention(window: int | None) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(40, 4, 8), torch.randn(300, 2, 8)
    bounds = torch.tensor([0, 33]), torch.tensor([0, 290])
    keys[290:] = torch.nan
    keys[: 0 if window is None else max(0, 258 - window)] = torch.nan  # nobody sees them
    mixed = attend_packed(queries, keys, -keys, *bounds, 300, window)
    wanted = attend(queries[:33], keys[:290].nan_to_num(), -keys[:290].nan_to_num(), window)
    torch.testing.assert_close(mixed[:33], wanted, rtol=0, atol=1e-6)
    nothing = attend_packed(queries, keys, -keys, torch.tensor([0, 0]), torch.tensor([0, 0]), 9, 1)
    assert nothing.shape == mixed.shape, "where a graph is recorded there is no token"
