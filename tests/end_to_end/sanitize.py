"""Launches of étude's kernel for compute-sanitizer to watch; CONTRIBUTING.md has the commands.

One query, several of one sequence over the end of a page, several sequences; greedy and sampled.
"""

import sys
from collections.abc import Sequence

from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.megakernel.choice import Choice
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query
from soloist.model.kv_format import KV_FORMATS
from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts

ROUNDS = 3


def launches(vocab_size: int) -> list[list[Query]]:
    ids = list(range(100, 172))
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, seed=7)
    sampled = Choice(params, TokenCounts(vocab_size, ids[:1]))
    return [
        [Query(0, c, ids[c::8], stride=8) for c in range(8)],  # 72 positions
        [Query(0, 70, [5])],
        [Query(0, 61 + c, [ids[c], 9], stride=4) for c in range(4)],
        [Query(0, 72, [5]), Query(1, 0, [6]), Query(2, 0, [7])],
        [Query(0, 72, [5], choice=sampled), Query(1, 3, [6])],
    ]


def tokens(model: KernelModel, queries: Sequence[Query]) -> list[list[int]]:
    return model.decoder.run(queries, 9 if len(queries) == 8 else ROUNDS)


def main() -> None:
    kv = next((name for name in KV_FORMATS if f"--kv={name}" in sys.argv), None)
    engine = Engine.load(
        EngineConfig("etude", "cuda", "bf16", 256, prepare=False, sequences=3, kv=kv)
    )
    model = engine.model
    assert isinstance(model, KernelModel), engine.report.refusal
    model.bind()
    wanted = None
    if "--compare" in sys.argv:
        wanted = [tokens(model, queries) for queries in launches(engine.config.vocab_size)]
    # A tool makes a block slow without its being stuck.
    model.decoder.load(Build(racecheck="--racecheck" in sys.argv, stuck_ns=4_000_000_000))
    found = [tokens(model, queries) for queries in launches(engine.config.vocab_size)]
    assert wanted in (None, found), "another build, other tokens"
    sys.stdout.write(f"{len(found)} launches, last tokens {[made[-1] for made in found]}\n")


main()
