"""What every decode kernel has alike, whatever its model and GPU. Pure."""

CONSUMER_WARPS = 8
# and four more: one that streams weights, one that talks to the host, two to make a group of four.
THREADS = (CONSUMER_WARPS + 4) * 32
# Query tokens of a round: what the multiplies' n dimension has room for.
MAX_QUERIES = 8
# Copies of each exchange buffer.
EXCHANGE_COPIES = 4
LEAST_RING_SLOTS = 2
# Shared memory that the compiler gives to static variables, at most.
STATIC_SHARED_BYTES = 1024
