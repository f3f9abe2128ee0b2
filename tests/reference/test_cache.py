"""What outlives a step: caches of several sequences, their capacity, and scratch."""

import pytest
import torch

from reference.compare import assert_close
from reference.lanes import FIELDS, random_tensors, write
from reference.oracle import Case, build, load, prompt, run, save
from soloist.model.config import Lanes
from soloist.reference.device import Reference
from soloist.reference.laneformer import DelayLine

WINDOWED = Case(
    "windowed",
    "qwen3",
    {
        "head_dim": 10,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
)


@pytest.fixture(scope="module", params=["dense", "lanes"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "dense":
        return load(save(build(WINDOWED), WINDOWED, folder))
    fields = {**FIELDS, "swa_layers": [0, 3], "sliding_window": 7}
    return load(write(fields, random_tensors(fields), folder))


def test_interleaved_sequences_do_not_meet(model: Reference) -> None:
    prompts = [prompt(40, model.config.vocab_size, seed) for seed in (1, 2)]
    wanted = [run(model, ids, [20] + [1] * 20, capacity=64) for ids in prompts]
    caches = [model.new_cache(64) for _ in prompts]
    seen: list[list[torch.Tensor]] = [[], []]
    for start, stop in [(0, 20)] + [(i, i + 1) for i in range(20, 40)]:
        for i, ids in enumerate(prompts):
            logits = model.forward(ids[start:stop], start, caches[i], "all")
            assert logits is not None
            seen[i].append(logits.clone())
    for i in range(2):
        assert_close(torch.cat(seen[i]), wanted[i], "interleaved sequences", f"sequence {i}")


def test_a_rewound_sequence_does_not_hear_what_was_taken_back(model: Reference) -> None:
    ids, other = (prompt(30, model.config.vocab_size, seed) for seed in (3, 4))
    wanted = run(model, ids, [10] + [1] * 20)
    cache = model.new_cache(30)
    model.forward(ids[:10], 0, cache)
    model.forward(other[10:], 10, cache)
    rows = []
    for t in range(10, 30):
        logits = model.forward(ids[t : t + 1], t, cache)
        assert logits is not None
        rows.append(logits.clone())
    assert_close(torch.cat(rows), wanted[10:], "repetition", "after going back to token 10")


@pytest.mark.parametrize("capacity", [31, 64, 500])
def test_capacity_does_not_matter(model: Reference, capacity: int) -> None:
    ids = prompt(30, model.config.vocab_size)
    chunks = [9, 1, 12, 1, 1, 1, 1, 4]
    wanted = run(model, ids, chunks)
    assert_close(
        run(model, ids, chunks, capacity), wanted, "cache capacity", f"room for {capacity}"
    )


def test_repetition_gives_the_same_bits(model: Reference) -> None:
    ids = prompt(30, model.config.vocab_size)
    wanted = run(model, ids, [9, 1, 20], capacity=33)
    assert_close(run(model, ids, [9, 1, 20], capacity=33), wanted, "repetition", "second time")


def test_a_long_prefill_between_two_steps_changes_nothing(model: Reference) -> None:
    ids = prompt(20, model.config.vocab_size)
    wanted = run(model, ids, [1] * 20, capacity=32)
    cache = model.new_cache(32)
    for t, token in enumerate(ids):
        run(model, prompt(100, model.config.vocab_size, seed=t), [50, 7, 43])
        logits = model.forward(token[None], t, cache)
        assert logits is not None
        assert_close(logits, wanted[t : t + 1], "repetition", f"token {t} after another prefill")


def test_a_long_prefill_gives_its_scratch_back(model: Reference) -> None:
    cache = model.new_cache(128)
    model.forward(prompt(100, model.config.vocab_size), 0, cache)
    assert model._scratch.num_bytes == 0


def test_decoding_allocates_nothing_that_grows(model: Reference) -> None:
    ids = prompt(100, model.config.vocab_size)
    cache = model.new_cache(100)
    model.forward(ids[:10], 0, cache)
    held = []
    for t in range(10, 100):
        model.forward(ids[t : t + 1], t, cache)
        held.append((len(model._scratch._held), model._scratch.num_bytes, cache.num_bytes))
    assert len(set(held)) == 1, "scratch or cache changed its size while decoding"


def test_requests_of_many_sizes_do_not_pile_up_scratch(model: Reference) -> None:
    ids = prompt(4, model.config.vocab_size)
    held = []
    for capacity in range(100, 110):
        cache = model.new_cache(capacity)
        for t in range(4):
            model.forward(ids[t : t + 1], t, cache)
        held.append(model._scratch.num_bytes)
    assert len(set(held)) == 1, "each capacity left scratch behind"


def test_steps_beyond_the_capacity_are_our_own_mistake(model: Reference) -> None:
    cache = model.new_cache(3)
    with pytest.raises(AssertionError, match="context"):
        model.forward(prompt(4, model.config.vocab_size), 0, cache)


def test_attention_in_tiles_is_attention(model: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(60, model.config.vocab_size)
    wanted = run(model, ids, [20, 40])
    for values in (1, 500, 1000):
        monkeypatch.setattr("soloist.reference.blocks.SCORE_VALUES", values)
        assert_close(run(model, ids, [20, 40]), wanted, "chunks", f"tiles of {values} scores")


def test_lanes_in_flight_are_forgotten_after_the_delay() -> None:
    lanes = Lanes(
        num_lanes=2,
        delay_layers=2,
        early_sum=False,
        attention_comm=True,
        mlp_comm=True,
        shared_norm_scales=True,
        head="replicate",
        sum_before_norm=False,
    )
    line = DelayLine(lanes, communicates=True)
    for layer in range(9):
        line.reduce(torch.full((2, 1, 3), float(layer)), layer)
        assert len(line._sent) <= 2
