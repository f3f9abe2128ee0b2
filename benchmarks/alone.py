"""Time one rank of several on a GPU of its own: `python benchmarks/alone.py SHAPE --gpus 8`.

What the rank tells the others it tells itself in their stead, so all of a token's time is there but
for the links'. For comparing designs where so many GPUs are not at hand, several in one run:
`--variant kCopies=2` sets constants of the kernel's header. Weights, keys and values are random;
tokens mean nothing, and none of this is a speed that may be quoted.
"""

import argparse
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from soloist.bench.subject import shape_dtype
from soloist.engine.support import find_support
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel import kernel
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.header import Build, header
from soloist.megakernel.launch import Query
from soloist.megakernel.plan import Plan
from soloist.megakernel.trace import block_times, spans
from soloist.model.families import read_config, tensors
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.elementwise import rope_table
from soloist.settings import read_settings
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_weights
from soloist.weights.sharding import shard_all

_LAUNCHES = 3  # after one that is not timed
_FIRST_TOKEN = 1000
_TRACED_ROUND = 40


def main() -> None:
    """Every variant of every shape, in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", type=Path, nargs="+", help="config.json files")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8], help="how many it is one of")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="first position")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=VALUE[,…]",
        help="constants of the header that are set; may be given several times",
    )  # fmt: skip
    parser.add_argument("--trace", action="store_true", help="also where a layer's time goes")
    asked = parser.parse_args()
    for shape in asked.shape:
        for gpus in asked.gpus:
            subject = _Alone(shape, gpus, asked.precision, max(asked.context) + asked.new_tokens)
            for variant in ["", *asked.variant]:
                subject.load(variant)
                print(f"{shape.stem}, one of {gpus}, {variant or 'as it is'}", flush=True)
                for context in asked.context:
                    print(f"    {subject.token_times(context, asked.new_tokens)}", flush=True)
                if asked.trace:
                    print(f"    {subject.layer(asked.context[0])}", flush=True)


class _Alone:
    """The first rank of a shape's plan."""

    def __init__(self, file: Path, gpus: int, precision: str, positions: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        config, dtype = read_config(file), shape_dtype(precision)
        support = find_support(config, dtype, device, gpus)
        assert support.plan is not None, support.refusal
        self.plan = support.plan
        whole = random_weights(tensors(config), dtype, device)
        weights = shard_all(self.plan.part_of(0), whole)
        pages = -(-positions // PAGE_POSITIONS)
        share = self.plan.share
        pool = PagePool(
            share.num_layers, self.plan.shape.pool_kv_heads, self.plan.shape.head_dim, pages,
            TORCH_DTYPES[dtype], device,
        )  # fmt: skip
        pool.tensor.normal_()
        rope = rope_table(share.rope, self.plan.shape.head_dim, pages * PAGE_POSITIONS, device)
        self._decoder = Decoder(
            self.plan, pack_weights(self.plan, weights, device), rope, pool.tensor,
            cache=read_settings().cache, build=Build(alone=True),
        )  # fmt: skip
        self._decoder.page_tables.copy_(torch.arange(pages, dtype=torch.int32))
        self._decoder.peers = [self._decoder] * gpus

    def load(self, variant: str, trace_round: int | None = None) -> None:
        """Take the kernel with these constants."""
        self._variant = variant
        kernel.header = lambda plan, build: with_constants(plan, build, variant)
        self._decoder.load(Build(alone=True, trace_round=trace_round))

    def token_times(self, context: int, rounds: int) -> str:
        """Median and range over launches, for people."""
        seen = sorted([self._token_us(context, rounds) for _ in range(_LAUNCHES + 1)][1:])
        return f"from {context:,}: {median(seen):.1f} us a token ({seen[0]:.1f} - {seen[-1]:.1f})"

    def _token_us(self, context: int, rounds: int) -> float:
        """Mean of one launch, as the host sees tokens come."""
        decoder = self._decoder
        decoder.prepare(decoder.pack([Query(0, context, [_FIRST_TOKEN])], rounds))
        decoder.go()
        decoder.mark_end()
        times = [time.perf_counter() for _ in decoder.tokens()]
        return (times[-1] - times[0]) / (rounds - 1) * 1e6

    def layer(self, context: int) -> str:
        """Stretches of a round, mean over blocks, us a layer."""
        self.load(self._variant, _TRACED_ROUND)
        self._token_us(context, _TRACED_ROUND + 2)
        sums: dict[str, int] = {}
        blocks = [block_times(self.plan, words) for words in self._decoder.trace.tolist()]
        for block in blocks:
            between = zip(spans(self.plan), pairwise(block.marks_ns), strict=True)
            for span, (start, end) in between:
                name = f"{span.phase} {span.name}"
                sums[name] = sums.get(name, 0) + end - start
        layers = self.plan.model.num_layers
        each = {name: ns / len(blocks) / layers / 1e3 for name, ns in sums.items()}
        return ", ".join(f"{name} {us:.2f}" for name, us in each.items())


def with_constants(plan: Plan, build: Build, variant: str) -> str:
    """The header with other values of some constants, NAME=VALUE[,…]. Raises SystemExit."""
    text = header(plan, build)
    for name, value in _settings(variant):
        text, found = re.subn(rf"(constexpr \w+ {name} =) [^;]+;", rf"\1 {value};", text)
        if found != 1:
            raise SystemExit(f"--variant: no constant of the kernel's header is called {name!r}")
    return text


def _settings(variant: str) -> Sequence[tuple[str, str]]:
    pairs = (setting.partition("=") for setting in variant.split(",") if setting)
    return [(name, value) for name, _, value in pairs]


if __name__ == "__main__":
    main()
