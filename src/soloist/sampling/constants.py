"""Every number that decides a token, once: other devices generate their constants from this file.

Floating-point constants are fp32 values written exactly. Polynomials list their coefficients from
the highest power down; those of ln and exp are Cephes' logf and expf (S. Moshier, 1989).
"""

# Philox4x32-10: multipliers of words 0 and 2, additions to the two key words after each round.
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
WORD_MASK = 0xFFFFFFFF

# Counter word 3 says what random words are for, so that two uses never share one.
DOMAIN_TOKEN_CHOICE = 0

# A word below this stands for a uniform above 3/4, where 1 - u is known more exactly than u.
NEAR_ONE_WORDS = 1 << 30
HALF = 0.5
WORD_SCALE = float.fromhex("0x1p-32")

# ln 2 as the sum of two fp32 values; an exponent times LN2_HIGH is exact.
LN2_HIGH = float.fromhex("0x1.63p-1")
LN2_LOW = float.fromhex("-0x1.bd0106p-13")
SQRT_HALF_BITS = 0x3F3504F3

# ln(1 + f) = f - f²/2 + f³ · P(f) for 1 + f in [√½, √2).
LN_POLYNOMIAL = (
    float.fromhex("0x1.204376p-4"),
    float.fromhex("-0x1.d7a370p-4"),
    float.fromhex("0x1.de4a34p-4"),
    float.fromhex("-0x1.fcba9ep-4"),
    float.fromhex("0x1.23d37ep-3"),
    float.fromhex("-0x1.555ca0p-3"),
    float.fromhex("0x1.999d58p-3"),
    float.fromhex("-0x1.fffff8p-3"),
    float.fromhex("0x1.555554p-2"),
)

# exp(r) = 1 + r + r² · P(r) for |r| <= ln(2)/2.
LOG2_E = float.fromhex("0x1.715476p+0")
EXP_POLYNOMIAL = (
    float.fromhex("0x1.a0d2cep-13"),
    float.fromhex("0x1.6e879cp-10"),
    float.fromhex("0x1.111210p-7"),
    float.fromhex("0x1.555382p-5"),
    float.fromhex("0x1.555554p-3"),
    float.fromhex("0x1.000000p-1"),
)

# The best token weighs 2^32; at EXP_FLOOR a weight has long rounded to zero.
WEIGHT_BITS = 32
EXP_FLOOR = -24.0

# top_p and min_p are taken in steps of 2^-24, so that comparing weights stays in integers.
FRACTION_BITS = 24
