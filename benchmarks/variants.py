"""Time variants of the decode kernel in turn: `python benchmarks/variants.py SHAPE:int4`.

Each `--variant` sets figures of `Tuning`, constants of the kernel's header, or `cuda=FOLDER`, a
changed copy of `src/soloist/cuda`; commas part them. All variants of a subject are loaded at once,
and launches of each, with each number of columns, are timed in turns, in an order that is shuffled:
so they share a card and what it is like at the time.
`--compile` needs no GPU: it says what each variant's code takes. Weights are random; tokens mean
nothing, and none of this is a speed that may be quoted.
"""

import argparse
import ast
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from unittest import mock
from zlib import crc32

import torch

from alone import with_constants
from soloist.bench.caches import gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.subject import Shape, random_prompt, read_shape, shape_dtype, shape_name
from soloist.engine.config import Precision
from soloist.engine.support import find_support, support_of
from soloist.errors import UserError
from soloist.jit.cache import load_or_build
from soloist.jit.compiler import Cubin
from soloist.jit.source import Source
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.pool import PagePool
from soloist.megakernel import gpu, kernel
from soloist.megakernel.choice import Choice
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.header import BUILT_FOR, Build
from soloist.megakernel.launch import Query
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.megakernel.ranks import Launcher, Ranks
from soloist.megakernel.tuning import Tuning
from soloist.model.dtype import Dtype
from soloist.model.quantized import Codes, Quantized
from soloist.model.torch_types import TORCH_DTYPES
from soloist.prefill.elementwise import rope_table
from soloist.sampling.adjust import TokenCounts
from soloist.sampling.params import SamplingParams
from soloist.settings import read_settings
from soloist.weights.choice import Rounding
from soloist.weights.distribution import distribute
from soloist.weights.loading import regrouped
from soloist.weights.packed import pack_weights
from soloist.weights.random import random_tensors

_ARCH = "sm_90a"
_FIRST_TOKEN = 1000
_PROMPT_TOKENS = 128
_BLOCKS = "fp8-block"
_FIELDS = {own.name: getattr(Tuning(), own.name) for own in fields(Tuning)}


@dataclass(frozen=True)
class Variant:
    """What is changed.

    Attributes:
        name: as it was given.
        tuning: figures of `Tuning`.
        constants: of the kernel's header, as `with_constants` takes them.
        cuda: the CUDA sources, if others.
    """

    name: str
    tuning: dict[str, object]
    constants: str = ""
    cuda: Path | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """What is planned, built and launched meanwhile is the variant's."""
        as_it_is = gpu.ARCHITECTURES[_ARCH]
        tuned = replace(as_it_is, tuning=replace(as_it_is.tuning, **self.tuning))
        source = Source if self.cuda is None else partial(Source, root=self.cuda)
        with (
            mock.patch.dict(gpu.ARCHITECTURES, {_ARCH: tuned}),
            mock.patch.object(kernel, "Source", source),
            mock.patch.object(
                kernel, "header", lambda plan, build: with_constants(plan, build, self.constants)
            ),
        ):
            yield


def read_variant(given: str) -> Variant:
    """NAME=VALUE[,NAME=VALUE…]; '' changes nothing.

    Raises:
        SystemExit: what is neither a figure nor a constant, or has no such value.
    """
    tuning: dict[str, object] = {}
    constants, cuda = list[str](), None
    for setting in filter(None, given.split(",")):
        name, _, value = setting.partition("=")
        if name == "cuda":
            cuda = Path(value).resolve()
            if not (cuda / "kernels" / "decode.cu").is_file():
                raise SystemExit(f"--variant {setting}: a copy of src/soloist/cuda is expected")
        elif name in _FIELDS:
            tuning[name] = _read_figure(setting, _FIELDS[name], value)
        elif name.startswith("k"):
            constants.append(setting)
        else:
            allowed = ", ".join(["cuda", *_FIELDS])
            raise SystemExit(f"--variant {setting}: allowed are a constant kNAME, {allowed}")
    return Variant(given or "as it is", tuning, ",".join(constants), cuda)


def _read_figure(setting: str, known: object, value: str) -> object:
    try:
        found = ast.literal_eval(value)
    except (SyntaxError, ValueError):
        found = value
    if type(found) is not type(known) and None not in {found, known}:
        raise SystemExit(f"--variant {setting}: a value like {known!r} is expected")
    return found


def read_subject(given: str, precision: Precision) -> tuple[str, Shape]:
    """CONFIG[:WEIGHTS[:HEAD]], with its name for people.

    Raises:
        SystemExit: no such formats.
        UserError: the file is no configuration, or has no such weights.
    """
    file, *formats = given.split(":")
    known = {codes.value: codes for codes in (Codes.INT4, Codes.INT8, Codes.FP8)}
    if len(formats) > 2 or any(f not in {"", _BLOCKS, *known} for f in formats):
        allowed = ", ".join([_BLOCKS, *known])
        raise SystemExit(f"{given}: CONFIG[:WEIGHTS[:HEAD]] is expected, with one of {allowed}")
    layers, head, *_ = [*formats, "", ""]
    rounding = Rounding(known.get(layers.removesuffix("-block")), known.get(head))
    shape = read_shape(Path(file), shape_dtype(precision), rounding)
    if layers == _BLOCKS:
        blocks = Quantized(Codes.FP8, 128, Dtype.BF16, scale_rows=128)
        of_layers = [spec.name for spec in shape.specs if spec.is_layer_matrix]
        shape = replace(shape, stored=shape.stored | dict.fromkeys(of_layers, blocks))
    return ":".join([shape_name(Path(file)), *formats]), shape


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0 if every subject ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("subjects", nargs="+", metavar="CONFIG[:WEIGHTS[:HEAD]]")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=VALUE[,…]")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--columns", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[128], help="first positions")
    parser.add_argument("--rounds", type=int, default=256, help="of a launch")
    parser.add_argument("--turns", type=int, default=5, help="of each variant")
    parser.add_argument("--launches", type=int, default=4, help="of a turn; power takes a second")
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds before each launch, for a cool card"
    )
    parser.add_argument(
        "--one-copy", action="store_true", help="of the weights, which all variants pack alike"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gpus", type=int, default=1, help="over which the model is spread")
    parser.add_argument(
        "--compile", type=Path, metavar="FOLDER", help="only compile, into this kernel cache"
    )
    asked = parser.parse_args(given)
    variants = [read_variant(one) for one in ["", *asked.variant]]
    for subject in asked.subjects:
        try:
            name, shape = read_subject(subject, asked.precision)
        except UserError as error:
            raise SystemExit(f"{subject}: {error}") from error
        if asked.compile:
            _compile(name, shape, variants, asked)
        else:
            _time(name, shape, variants, asked)
    return 0


# --- code --------------------------------------------------------------------


def _compile(
    name: str, shape: Shape, variants: Sequence[Variant], asked: argparse.Namespace
) -> None:
    """What the code of each build takes."""
    for variant, n, cubin in _built(name, shape, variants, asked, asked.compile):
        entry = cubin.report.entries["decode"]
        took = f"{entry.registers} registers, {entry.spill_store_bytes} bytes spilled"
        size = f"{len(cubin.data) / 1024:.0f} KB of cubin"
        print(f"{name}, up to {n} columns, {variant.name}: {took}, {size}", flush=True)


def _built(
    name: str,
    shape: Shape,
    variants: Sequence[Variant],
    asked: argparse.Namespace,
    cache: Path | None,
) -> Iterator[tuple[Variant, int, Cubin]]:
    """All builds that are timed, with the queries of each; one at a time for each core."""
    jobs = [(variant, n) for variant in variants for n in _queries(asked)]
    sources = []
    for variant, n in jobs:
        with variant.in_force():
            plan = support_of(
                TYPICAL[_ARCH], shape.config, shape.dtype, asked.gpus, shape.stored, shape.kv
            ).plan
            if plan is None:
                raise SystemExit(f"{name}: the kernel does not run it")
            text = kernel.header(plan, replace(_build(asked), queries=n))
            sources.append(kernel.Source("kernels/decode.cu", text))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(lambda source: load_or_build(source, _ARCH, cache), sources)
        for (variant, n), cubin in zip(jobs, built, strict=True):
            yield variant, n, cubin


def _queries(asked: argparse.Namespace) -> list[int]:
    """For how many queries there is a build that is timed."""
    return sorted({next(n for n in BUILT_FOR if n >= columns) for columns in asked.columns})


def _build(asked: argparse.Namespace) -> Build:
    return Build(samples=asked.temperature > 0)


# --- time --------------------------------------------------------------------


def _time(name: str, shape: Shape, variants: Sequence[Variant], asked: argparse.Namespace) -> None:
    devices = [torch.device("cuda", i) for i in range(asked.gpus)]
    positions = max(asked.context) + max(asked.columns) + asked.rounds
    list(_built(name, shape, variants, asked, read_settings().cache))  # decoders find them there
    queries = _queries(asked)
    decoders, packed = list[Launcher](), None
    for variant in variants:
        with variant.in_force():
            plan = _plan(shape, devices)
            if packed is None or not asked.one_copy:
                packed = _weights(plan, shape, devices)
            # What is not timed is not built.
            with mock.patch.object(kernel, "BUILT_FOR", (queries[0], queries[-1])):
                decoders.append(_launcher(plan, packed, positions, devices, _build(asked)))
                if asked.temperature:
                    decoders[-1].prepare_sampling()
    for context in asked.context:
        _time_from(context, name, list(zip(variants, decoders, strict=True)), devices[0], asked)


@dataclass
class _Seen:
    """Of one variant with so many columns: round times in us, what the tokens are, and power."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    power: str = "unknown"


def _time_from(
    context: int,
    name: str,
    loaded: Sequence[tuple[Variant, Launcher]],
    device: torch.device,
    asked: argparse.Namespace,
) -> None:
    variants = [variant for variant, _ in loaded]
    seen = {(v.name, columns): _Seen() for v in variants for columns in asked.columns}
    jobs = list(product(loaded, asked.columns))
    order = random.Random(context)  # noqa: S311
    for turn in range(asked.turns + 1):
        # At the limit of power a launch's time depends on the one before.
        order.shuffle(jobs)
        for (variant, decoder), columns in jobs:
            own = seen[variant.name, columns]
            # Looking takes time.
            watched = gpu_uuid(device) if turn == asked.turns else None
            with variant.in_force(), watching(watched) as watch:
                times = [
                    _round_us(decoder, context, columns, asked, own) for _ in range(asked.launches)
                ]
            if turn:  # the first one warms up
                own.times += times
                if (clocks := watch.clocks) is not None:
                    own.power = f"{clocks.power_w.median:.0f} W at {clocks.sm_mhz.median:.0f} MHz"
    for columns in asked.columns:
        what = f"{name}, {columns} columns from position {context} on"
        print(f"{what}, us a round; the last turn's power", flush=True)
        as_it_is = seen[variants[0].name, columns]
        for variant in variants:
            own = seen[variant.name, columns]
            told = f"{median(own.times):.1f} ({min(own.times):.1f} to {max(own.times):.1f})"
            more = f"{median(own.times) / median(as_it_is.times) - 1:+6.2%}  {own.power}"
            other = "" if own.tokens == as_it_is.tokens else "other tokens  "
            print(f"    {told:28} {more}  {other}{variant.name}", flush=True)


def _plan(shape: Shape, devices: Sequence[torch.device]) -> Plan:
    plan = find_support(
        shape.config, shape.dtype, devices[0], len(devices), stored=shape.stored, kv=shape.kv
    ).plan
    if plan is None:
        raise SystemExit("the kernel does not run it")
    return plan


def _launcher(
    plan: Plan,
    weights: Sequence[PackedWeights],
    positions: int,
    devices: Sequence[torch.device],
    build: Build,
) -> Launcher:
    """The kernel alone, without what reads prompts; keys and values are random."""
    decoders = [
        _decoder(plan, own, positions, rank, device, build)
        for rank, (own, device) in enumerate(zip(weights, devices, strict=True))
    ]
    return decoders[0] if len(decoders) == 1 else Ranks(decoders)


def _decoder(
    plan: Plan,
    weights: PackedWeights,
    positions: int,
    rank: int,
    device: torch.device,
    build: Build,
) -> Decoder:
    pages = -(-positions // PAGE_POSITIONS)
    pool = PagePool(
        plan.share.num_layers, plan.shape.pool_kv_heads, plan.shape.head_dim, pages,
        TORCH_DTYPES[plan.dtype], device, plan.kv,
    )  # fmt: skip
    torch.manual_seed(rank)  # the same for all variants
    pool.fill()
    rope = rope_table(plan.share.rope, plan.shape.head_dim, pages * PAGE_POSITIONS, device)
    decoder = Decoder(
        plan, weights, rope, pool.tensor, rank=rank, max_sequences=1,
        cache=read_settings().cache, build=build,
    )  # fmt: skip
    decoder.page_tables.copy_(torch.arange(pages, dtype=torch.int32))
    return decoder


def _weights(plan: Plan, shape: Shape, devices: Sequence[torch.device]) -> list[PackedWeights]:
    """Of every rank."""
    kept = {name: shape.stored[name] for name in plan.formats}
    drawn = random_tensors(shape.specs, shape.dtype, devices[0], stored=kept)
    parts = regrouped(drawn, shape.specs, kept, plan.formats)
    shares = distribute(parts, shape.config, devices, stays_on_host=False, plan=plan)
    return [pack_weights(plan, *own) for own in zip(shares, devices, strict=True)]


def _round_us(
    decoder: Launcher, context: int, columns: int, asked: argparse.Namespace, seen: _Seen
) -> float:
    """Mean of one launch, as the host sees tokens come."""
    choice, config = None, decoder.plan.model
    if asked.temperature:
        params = SamplingParams(temperature=asked.temperature, seed=1)
        counts = TokenCounts(config.vocab_size, random_prompt(config, _PROMPT_TOKENS))
        choice = Choice(params, counts)
    queries = [Query(0, context + c, [_FIRST_TOKEN], choice=choice) for c in range(columns)]
    time.sleep(asked.rest)
    decoder.start(queries, asked.rounds)
    times, tokens = list[float](), list[list[int]]()
    for chosen in decoder.tokens():
        times.append(time.perf_counter())
        tokens.append(chosen)
    seen.tokens = crc32(str(tokens).encode())
    return (times[-1] - times[0]) / (asked.rounds - 1) * 1e6


if __name__ == "__main__":
    sys.exit(main())
