"""Time a mixture of experts in the decode kernel: `python benchmarks/experts.py SHAPE`.

Weights and routers are random. Rounds come after random tokens and follow tokens of the kernel's
own; prompts are read by prefill. Experts are drawn while they are packed, so that 30 billion
parameters in 16 bits fit 80 GB. `--layers` leaves some layers out: the time of one is the
difference of two such runs over the difference of their layers.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.support import find_support
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.header import ABLATIONS, Build
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.trace import block_times, spans
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.quantized import Codes, Quantized
from soloist.settings import read_settings
from soloist.weights.distribution import distribute
from soloist.weights.random import random_tensors

_TIMES = 3  # after one that is not timed
_FIRST_TOKEN = 1000
_TRACED_ROUND = 32
# Of the layers' matrices; the head is in 16 bits, as in the checkpoints that there are.
_FORMATS = {
    "bf16": None,
    "fp8": Quantized(Codes.FP8, 128, Dtype.FP32, scale_rows=128),
    "int4": Quantized(Codes.INT4, 128, Dtype.BF16),
}


def main() -> None:
    """One query, then eight of as many sequences, then prompts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", type=Path, help="a config.json file")
    parser.add_argument("--layers", type=int, help="so many of them; by default all")
    parser.add_argument("--weights", choices=_FORMATS, default="bf16")
    parser.add_argument("--context", type=int, default=128, help="first position that is timed")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument(
        "--trace", action="store_true", help="tell where the time of a round with one query goes"
    )
    asked = parser.parse_args()
    config = read_config(asked.shape)
    config = replace(config, layers=config.layers[: asked.layers])
    most = max(asked.context + asked.new_tokens, *asked.prompt_tokens, 0)
    model = _model(config, asked.weights, most)
    print(model.plan.describe())
    for queries in (1, MAX_QUERIES):
        each = _seconds_of_rounds(model, queries, asked.context, asked.new_tokens)
        print(f"{queries} queries: {each * 1e6:.1f} µs a round, {1 / each:,.1f} rounds/s")
    if asked.trace:
        for leaves_out in ("none", "stream"):
            _tell_trace(model, asked.context, leaves_out)
        model.decoder.load(Build())
    print(f"prompts: passes of {model.prefill.widths or 'any'} rows")
    for tokens in asked.prompt_tokens:
        seconds = _seconds_of_prompt(model, tokens)
        print(f"{tokens:,} tokens: {seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s")


def _model(config: ModelConfig, weights: str, context_tokens: int) -> KernelModel:
    device, specs = torch.device("cuda", torch.cuda.current_device()), tensors(config)
    to = _FORMATS[weights]
    stored = {} if to is None else {s.name: to for s in specs if s.is_layer_matrix}
    found = find_support(config, Dtype.BF16, device, stored=stored)
    if found.plan is None:
        raise SystemExit(found.refusal)
    if found.plan.formats.keys() != stored.keys():
        raise SystemExit(f"the kernel does not read {weights} of this shape")
    capacity = Capacity(context_tokens, MAX_QUERIES, keeps_prefixes=True)
    drawn = random_tensors(specs, Dtype.BF16, device, stored=stored)
    own = distribute(drawn, config, [device], stays_on_host=False, plan=found.plan)
    cache = read_settings().cache
    model = load_kernel(found.plan, own, [device], capacity, cache, keep_rows=True)
    model.prepare()
    return model


def _random_ids(model: KernelModel, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.plan.model.vocab_size, shape, generator=generator)


def _seconds_of_rounds(model: KernelModel, queries: int, context: int, new_tokens: int) -> float:
    """Of a round, behind a context of random tokens."""
    decoder = model.decoder
    ids = _random_ids(model, queries, context).tolist()
    decoder.run([Query(i, 0, own) for i, own in enumerate(ids)], context)
    follows = [Query(i, context, [_FIRST_TOKEN + i]) for i in range(queries)]
    return _median_seconds(lambda: decoder.run(follows, new_tokens)) / new_tokens


def _tell_trace(model: KernelModel, context: int, leaves_out: str) -> None:
    """Mean time of a block between two marks, over the layers, in µs a layer."""
    decoder = model.decoder
    decoder.load(Build(trace_round=_TRACED_ROUND, ablation=ABLATIONS[leaves_out]))
    decoder.run([Query(0, context, [_FIRST_TOKEN])], _TRACED_ROUND + 2)
    blocks = [block_times(model.plan, row) for row in decoder.trace.tolist()]
    # A router waits twice: for activations, and for the logits of other blocks.
    parts, seen = [], Counter[tuple[int | None, str]]()
    for span in spans(model.plan):
        name = "outside of layers" if span.layer is None else f"{span.phase} {span.name}"
        seen[span.layer, name] += 1
        again = span.layer is not None and seen[span.layer, name] > 1
        parts.append(f"{name} again" if again else name)
    times: Counter[str] = Counter()
    for block in blocks:
        for part, (start, end) in zip(parts, pairwise(block.marks_ns), strict=True):
            times[part] += end - start
    scale = 1e3 * len(blocks) * len(model.plan.model.layers)
    print(f"µs a layer, without {leaves_out}: {sum(times.values()) / scale:.2f}")
    print(", ".join(f"{part} {ns / scale:.2f}" for part, ns in times.items()))


def _seconds_of_prompt(model: KernelModel, tokens: int) -> float:
    ids, pages = _random_ids(model, tokens), list(range(-(-tokens // PAGE_POSITIONS)))

    def read() -> None:
        model.prefill.run_prompt(ids, pages, model.prefill.most_tokens, lambda: False)
        model.synchronize()

    return _median_seconds(read)


def _median_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times[1:])


if __name__ == "__main__":
    main()
