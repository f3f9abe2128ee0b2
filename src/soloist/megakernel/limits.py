"""What every decode kernel has alike, whatever its model and GPU. Pure."""

CONSUMER_WARPS = 8
# and four more: one that streams weights, one that talks to the host, two to make a group of four.
THREADS = (CONSUMER_WARPS + 4) * 32
# Query tokens of a round: what the multiplies' n dimension has room for.
MAX_QUERIES = 8
# Rounds of a launch whose logits there is room for: tokens whose probabilities are wanted come as
# many at a time at most, and every eight of them wait for a launch.
KEPT_ROUNDS = 8
# Copies of each exchange buffer.
EXCHANGE_COPIES = 4
LEAST_RING_SLOTS = 2
# Shared memory that the compiler gives to static variables, at most.
STATIC_SHARED_BYTES = 1024
