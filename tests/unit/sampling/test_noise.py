"""Random words, Gumbel noise and weights: published answers, fixed bits, accuracy, independence."""

import numpy as np
import pytest
import torch

from soloist.sampling import constants
from soloist.sampling.elementary import integer_weights
from soloist.sampling.noise import (
    Noise,
    gumbel_of_words,
    noise_of,
    noisy_argmax,
    philox,
    token_words,
)

# Random123 1.14, tests/kat_vectors: "philox4x32 10", counter, key, answer.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert tuple(int(w) for w in philox(counter, key[0] | key[1] << 32)) == answer


def gumbel_noise(seed: int, position: int, token_ids) -> np.ndarray:
    """The definition: every token's noise by itself."""
    return gumbel_of_words(token_words(seed, position, token_ids))


def test_a_token_owns_one_word_of_one_block():
    seed, position = 0x0123456789ABCDEF, 5 << 32 | 9
    for token_id in (0, 1, 2, 3, 4, 1001, 151935):
        block = philox((token_id >> 2, 9, 5, constants.DOMAIN_TOKEN_CHOICE), seed)
        word = token_words(seed, position, np.array([token_id]))
        assert int(word[0]) == int(block[token_id & 3])


def test_noise_does_not_depend_on_which_other_tokens_are_asked_for():
    everything = gumbel_noise(3, 4, np.arange(1001))
    few = np.array([0, 5, 6, 999, 1000])
    assert np.array_equal(gumbel_noise(3, 4, few), everything[few])


def test_noise_of_a_vocabulary_is_that_of_each_token():
    """In parts, with gaps of any width, from any token on."""
    everything = gumbel_noise(2**63 + 1, 2**33, np.arange(3, 100_001))
    rng = np.random.default_rng(0)
    for count in (1, 5, 300, 30_000, 90_000):
        ids = np.sort(rng.choice(np.arange(3, 100_001), count, replace=False))
        assert np.array_equal(gumbel_noise(2**63 + 1, 2**33, ids), everything[ids - 3])
    for token_id in (3, 32_770, 32_771, 65_538, 65_539, 100_000):
        alone = gumbel_noise(2**63 + 1, 2**33, np.array([token_id]))
        assert alone[0] == everything[token_id - 3]


def test_weights_of_a_vocabulary_are_those_of_each_token():
    gaps = -np.random.default_rng(0).exponential(8, 100_000).astype(np.float32)
    weights = integer_weights(gaps)
    assert weights.shape == gaps.shape
    for i in (0, 32_767, 32_768, 65_536, 99_999):
        assert weights[i] == integer_weights(gaps[i : i + 1])[0]
    assert np.array_equal(weights[40_000:50_000], integer_weights(gaps[40_000:50_000]))


@pytest.mark.parametrize(
    ("seed", "position", "token_id", "bits"),
    [  # one changed bit here changes what every seed means
        (0, 0, 0, "0x1.5984ae0000000p-1"),
        (0, 0, 1, "-0x1.81d6300000000p-1"),
        (0, 1, 0, "0x1.3b7e440000000p-1"),
        (1, 0, 0, "-0x1.95ed660000000p-1"),
        (18446744073709551615, 0, 7, "0x1.4d39220000000p-6"),
        (123456789, 4294967301, 8191, "0x1.0f5af00000000p+1"),
        (42, 100, 151935, "0x1.3c7ac80000000p-1"),
        (8589934592, 17, 50000, "-0x1.d529480000000p-1"),
    ],
)
def test_noise_keeps_its_bits(seed, position, token_id, bits):
    assert float(gumbel_noise(seed, position, np.array([token_id]))[0]).hex() == bits


def _all_kinds_of_words():
    rng = np.random.default_rng(0)
    edges = [0, 1, 2, 3, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 2, 2**32 - 1]
    small = np.arange(5000)
    return np.concatenate(
        [edges, small, 2**32 - 1 - small, rng.integers(0, 2**32, 150_000)]
    ).astype(np.uint64)


def _torch_ln(exponent, fraction):
    square = fraction * fraction
    value = torch.full_like(fraction, constants.LN_POLYNOMIAL[0])
    for coefficient in constants.LN_POLYNOMIAL[1:]:
        value = torch.add(torch.mul(value, fraction), torch.tensor(coefficient))
    tail = torch.mul(torch.mul(value, fraction), square)
    tail = torch.add(tail, torch.mul(exponent, torch.tensor(constants.LN2_LOW)))
    tail = torch.sub(tail, torch.mul(square, torch.tensor(0.5)))
    high = torch.mul(exponent, torch.tensor(constants.LN2_HIGH))
    return torch.add(torch.add(fraction, tail), high)


def _torch_split(x):
    bits = x.view(torch.int32)
    exponent = (bits - constants.SQRT_HALF_BITS) >> 23
    return exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1


def _torch_gumbel(words):
    words = torch.from_numpy(words.astype(np.int64))
    small = (words.float() + 0.5) * 2.0**-32
    exponent, fraction = _torch_split(((2**32 - 1 - words).float() + 0.5) * 2.0**-32)
    fraction = torch.where(words < 2**30, -small, fraction)
    return -_torch_ln(*_torch_split(-_torch_ln(exponent, fraction)))


def test_torch_follows_the_definition_bit_for_bit():
    words = _all_kinds_of_words()
    ours, theirs = gumbel_of_words(words), _torch_gumbel(words).numpy()
    assert np.array_equal(ours.view(np.int32), theirs.view(np.int32))


def test_noise_is_accurate_finite_and_bounded():
    words = _all_kinds_of_words()
    noise = gumbel_of_words(words)
    uniform = (words.astype(np.float64) + 0.5) / 2**32
    exact = -np.log(-np.log1p(-uniform))
    error = np.abs(noise - exact) / np.maximum(1, np.abs(exact))
    assert error.max() < 4e-7
    assert noise.min() > -3.13
    assert noise.max() < 22.88


def test_noise_never_exceeds_its_bound_by_more_than_a_little():
    words = _all_kinds_of_words()
    bounds = _bounds(words)
    made = noise_of(3, 4, np.arange(99))
    assert np.array_equal(made.words, token_words(3, 4, np.arange(99)))
    assert np.array_equal(made.bounds, _bounds(made.words))
    assert (gumbel_of_words(words) <= bounds + 1e-5).all()
    likely = words < 2**26
    assert (bounds - gumbel_of_words(words))[likely].max() < 0.01, "bounds of large noise are close"


def _bounds(words):
    return -np.log((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32))


def _scores(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    scores = rng.normal(0, 3, count)
    if kind == "equal":
        scores[:] = 1.5
    elif kind == "few values":
        scores = np.rint(scores)
    elif kind == "peaked":
        scores[rng.integers(count)] += 60
    elif kind == "banned":
        scores[rng.random(count) < 0.9] = -np.inf
        scores[rng.integers(count)] = 0
    elif kind == "large":
        scores *= 1e8
    elif kind == "huge":
        scores *= 1e37
    elif kind == "far below":
        scores -= 1e6
    return scores.astype(np.float32)


@pytest.mark.parametrize(
    "kind", ["normal", "equal", "few values", "peaked", "banned", "large", "huge", "far below"]
)
def test_the_largest_sum_is_found_by_bounds(kind):
    rng = np.random.default_rng(5)
    for number in range(300):
        count = int(rng.choice([1, 2, 5, 100, 3000]))
        scores, ids = _scores(rng, kind, count), np.arange(count)
        noise = noise_of(number, number * 7, ids)
        sums = scores + gumbel_noise(number, number * 7, ids)
        assert noisy_argmax(scores, noise) == int(sums.argmax())


def test_the_lowest_of_equal_sums_is_found_by_bounds():
    words = np.array([7, 2**31, 9, 5, 5, 9], np.uint64)
    assert noisy_argmax(np.zeros(6, np.float32), Noise(words, _bounds(words))) == 3
    scores = np.array([0, 1e9, 1e9, 0, 1e9, 0], np.float32)  # noise is lost in rounding
    assert noisy_argmax(scores, Noise(words, _bounds(words))) == 1


def test_few_tokens_of_a_vocabulary_need_their_noise(monkeypatch):
    asked = []

    def counted(words):
        asked.append(len(words))
        return gumbel_of_words(words)

    monkeypatch.setattr("soloist.sampling.noise.gumbel_of_words", counted)
    rng = np.random.default_rng(1)
    for number in range(20):
        scores = rng.normal(0, 3, 151_936).astype(np.float32)
        noisy_argmax(scores, noise_of(1, number, np.arange(151_936)))
    assert len(asked) == 20
    assert max(asked) < 100


def test_weights_are_accurate_and_end_exactly():
    gaps = -np.linspace(0, 20, 100_001, dtype=np.float32)
    exact = np.exp(gaps.astype(np.float64)) * 2**32
    assert (np.abs(integer_weights(gaps) - exact) <= 0.51 + 3e-7 * exact).all()
    special = np.array([0.0, -0.0, -23.0, -1e30, -np.inf], np.float32)
    assert integer_weights(special).tolist() == [2**32, 2**32, 0, 0, 0]


def test_torch_finds_the_same_weights():
    gaps = -torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 25
    x = torch.clamp(gaps, min=constants.EXP_FLOOR)
    halvings = torch.round(x * torch.tensor(constants.LOG2_E))
    rest = x - halvings * torch.tensor(constants.LN2_HIGH)
    rest = rest - halvings * torch.tensor(constants.LN2_LOW)
    value = torch.full_like(rest, constants.EXP_POLYNOMIAL[0])
    for coefficient in constants.EXP_POLYNOMIAL[1:]:
        value = value * rest + torch.tensor(coefficient)
    power = (value * (rest * rest) + rest) + 1
    scale = ((halvings.to(torch.int32) + 159) << 23).view(torch.float32)
    theirs = torch.round(power * scale).to(torch.int64)
    assert np.array_equal(integer_weights(gaps.numpy()), theirs.numpy())


def test_noise_is_standard_gumbel_and_uncorrelated():
    # 200 × 500 values; a mean of n uncorrelated products stays within 5/√n but for one in 10^6.
    noise = np.stack([gumbel_noise(11, position, np.arange(500)) for position in range(200)])
    centred = (noise - np.euler_gamma) / (np.pi / np.sqrt(6))
    bound = 5 / np.sqrt(noise.size)
    assert abs(centred.mean()) < bound
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < bound
    assert abs((centred[1:] * centred[:-1]).mean()) < bound
    other = np.stack([gumbel_noise(12, position, np.arange(500)) for position in range(200)])
    centred_other = (other - np.euler_gamma) / (np.pi / np.sqrt(6))
    assert abs((centred * centred_other).mean()) < bound
