"""Masks: which tokens a constraint leaves, and how that meets everything else."""

import numpy as np
import pytest
import torch

from soloist.errors import BadLogits, GrammarFailed
from soloist.sampling import Sampler, SamplingParams
from soloist.sampling.constraint import flags_of, has_bit, num_words, set_bit, words_of
from unit.sampling.constraints import Drawn, Steps

VOCAB = 77  # no multiple of 32
EOS = 3


def sampler_of(sets, ends=(), eos_ids=(EOS,), **values) -> Sampler:
    constraint = Steps(VOCAB, sets, ends)
    return Sampler(SamplingParams(**values), VOCAB, [1, 2], eos_ids, constraint)


def logits_of(best: dict[int, float]) -> torch.Tensor:
    logits = torch.linspace(-1, 0, VOCAB)
    for token_id, value in best.items():
        logits[token_id] = value
    return logits


def test_bits_of_words() -> None:
    words = words_of([0, 31, 32, 76], VOCAB)
    assert words.tolist() == [1 + 2**31, 1, 1 << 12]
    assert len(words) == num_words(VOCAB) == 3
    assert np.flatnonzero(flags_of(words, VOCAB)).tolist() == [0, 31, 32, 76]
    set_bit(words, 31, value=False)
    set_bit(words, 33, value=True)
    assert [i for i in range(VOCAB) if has_bit(words, i)] == [0, 32, 33, 76]


def test_only_what_is_allowed_is_chosen() -> None:
    sampler = sampler_of([{5, 9}, {5, 6}])
    assert sampler.pick(logits_of({70: 9, 9: 2, 5: 1}), 2) == 9
    sampler.observe(9)
    assert sampler.pick(logits_of({9: 9, EOS: 9}), 3) == 6
    assert np.flatnonzero(flags_of(sampler.allowed(), VOCAB)).tolist() == [5, 6]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_logit_of_a_token_that_is_not_allowed_does_no_harm(bad) -> None:
    assert sampler_of([{5, 9}]).pick(logits_of({70: bad, 9: 2}), 2) == 9
    with pytest.raises(BadLogits):
        sampler_of([{5, 9}]).pick(logits_of({9: bad}), 2)


def test_every_way_to_change_scores_leaves_the_mask_alone() -> None:
    values = {
        "logit_bias": {7: 100.0}, "repetition_penalty": 0.01, "frequency_penalty": -2.0,
        "presence_penalty": -2.0,
    }  # fmt: skip
    for more in (
        {},
        {"temperature": 50.0, "seed": 1},
        {"temperature": 9.0, "seed": 2, "top_k": 70},
    ):
        sampler = Sampler(
            SamplingParams(**values, **more),
            VOCAB,
            [7],
            (EOS,),
            Steps(VOCAB, [{7}, {5, 9}, {5, 9}]),
        )
        sampler.observe(7)
        for _ in range(2):
            token_id = sampler.pick(logits_of({7: 50, EOS: 50}), 2)
            assert token_id in (5, 9)
            sampler.observe(token_id)


def test_filters_count_allowed_tokens_only() -> None:
    seen = set()
    for seed in range(40):
        sampler = sampler_of([{5, 9, 20}], temperature=1.0, seed=seed, top_k=2)
        seen.add(sampler.pick(logits_of({70: 9, 5: 2, 9: 2, 20: 1}), 2))
    assert seen == {5, 9}


def test_ending_tokens_come_where_the_output_may_end_and_nowhere_else() -> None:
    best = logits_of({EOS: 9, 8: 8})
    sampler = sampler_of([{5, 8}, {5, EOS, 8}, {5}], ends=(2,), stop_token_ids=frozenset({8}))
    assert sampler.pick(best, 2) == 5, "8 is a stop token, and the output may not end"
    sampler.observe(5)
    assert sampler.pick(best, 3) == 5
    sampler.observe(5)
    assert sampler.pick(best, 4) == EOS
    free = sampler_of([{5, 8}, {5}], ends=(0,), ignore_eos=True)
    assert free.pick(best, 2) == 8, "the model's own tokens are like any other"


def test_min_tokens_bans_the_end_that_the_form_allows() -> None:
    sampler = sampler_of([{5}, {5}], ends=(0, 1), min_tokens=1)
    assert sampler.pick(logits_of({EOS: 9}), 2) == 5
    sampler.observe(5)
    assert sampler.pick(logits_of({EOS: 9}), 3) == EOS


def test_what_is_complete_is_over() -> None:
    sampler = sampler_of([{5}])
    assert not sampler.is_complete
    sampler.observe(5)
    assert sampler.is_complete
    assert np.flatnonzero(flags_of(sampler.allowed(), VOCAB)).tolist() == [EOS]
    assert not Sampler(SamplingParams(), VOCAB, [1]).is_complete


def test_where_nothing_is_allowed_the_request_fails() -> None:
    sampler = sampler_of([{8}], stop_token_ids=frozenset({8}))
    assert list(sampler.forced_ids) == [], "a stop token is never forced"
    with pytest.raises(GrammarFailed, match="no token of the vocabulary"):
        sampler.pick(logits_of({}), 2)
    with pytest.raises(GrammarFailed):
        sampler_of([{5}]).observe(6)


def test_forced_tokens_come_one_by_one_or_at_once() -> None:
    sets = [{5, 6}, {7}, {9}, {11}, {5, 6}]
    one, all_of_them = sampler_of(sets), sampler_of(sets)
    for sampler in (one, all_of_them):
        assert list(sampler.forced_ids) == []
        sampler.observe(sampler.pick(logits_of({6: 5}), 2))
    assert list(all_of_them.forced_ids) == [7, 9, 11]
    for wanted in (7, 9, 11):
        assert one.pick(logits_of({70: 99}), 3) == wanted
        assert np.flatnonzero(flags_of(one.allowed(), VOCAB)).tolist() == [wanted]
        one.observe(wanted)
        all_of_them.observe(wanted)
    assert list(one.forced_ids) == list(all_of_them.forced_ids) == []
    assert one.output_ids == all_of_them.output_ids == [6, 7, 9, 11]


def test_rollback_takes_the_constraint_along() -> None:
    sampler = sampler_of([{5, 6}, {7}, {9, 10}], ends=(3,))
    for token_id in (5, 7, 10, EOS):
        sampler.observe(token_id)
    sampler.rollback(3)
    assert list(sampler.forced_ids) == [7]
    sampler.rollback(1)
    assert sampler.pick(logits_of({6: 5}), 2) == 6


def test_a_constraint_is_part_of_the_definition() -> None:
    """Masked logits give what the same logits give that were minus infinity to begin with."""
    rng = np.random.default_rng(0)
    for seed in range(30):
        params = SamplingParams(temperature=1.3, seed=seed, top_p=0.8, min_p=0.01)
        sampler = Sampler(params, VOCAB, [1], (EOS,), Drawn(VOCAB, seed))
        logits = torch.from_numpy(rng.normal(size=VOCAB).astype(np.float32) * 3)
        cut = logits.clone()
        cut[torch.from_numpy(~flags_of(sampler.allowed(), VOCAB))] = -torch.inf
        assert sampler.pick(logits, 5) == Sampler(params, VOCAB, [1], (EOS,)).pick(cut, 5)
