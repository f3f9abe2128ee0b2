"""Time products with packed matrices against the library: `python benchmarks/packed_product.py`.

One Hopper GPU. Every matrix of a shape's layers is multiplied with so many tokens: row by row by
torch (and gate_up by Soloist's kernel where prompts take that), and as it is packed, in every
variant of the kernel: tokens of a tile, groups of warps, slots of tokens, fragments of a tile of
rows. Layers take turns, in a CUDA graph, so that weights come from
memory. Weights are random; nothing here is a speed of a whole prompt.

`--compile` builds all kernels into the cache and needs no GPU: do it before a GPU is borrowed.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.bench.subject import Shape, rounded_shape
from soloist.engine.support import support_of
from soloist.jit.cache import load_or_build
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.quantized import Codes
from soloist.prefill.fragments import (
    GROUP_FRAGMENTS,
    Load,
    RowCut,
    Tiling,
    best_shares,
    fragments,
    tiled,
)
from soloist.prefill.fused import Kernels, pointer
from soloist.prefill.gate_up import GateUp
from soloist.prefill.header import THREADS
from soloist.prefill.packed_form import (
    ARCH,
    MOST_PARTED_TOKENS,
    TOKEN_SLOTS,
    WIDTHS,
    Form,
    Out,
    form_of,
    is_gated,
    parts_of,
    quantize_source,
    rows_source,
)
from soloist.prefill.packed_product import (
    PackedProduct,
    PackedQuantize,
    PackedRows,
    on_device,
)
from soloist.prefill.sources import prefill_sources
from soloist.settings import read_settings
from soloist.weights.choice import Rounding

SHAPES = ("llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama", "llama-3.1-8b")
# By activations in 8 bits, too.
EIGHT_BITS = "fp8-8-bits"
KINDS: dict[str, Codes | None] = {
    "bf16": None, "fp8": Codes.FP8, EIGHT_BITS: Codes.FP8, "int4": Codes.INT4,
}  # fmt: skip
MATRICES = ("qkv", "attention_output", "gate_up", "down")
_DEVICE = "cuda"
_FOLDER = Path(__file__).parent / "shapes"
# Launches in a graph, and how often it runs after once.
_LAUNCHES, _REPLAYS = 12, 2
_REST_S = 0.005


@dataclass(frozen=True)
class Case:
    """One matrix of a shape, as one kind of weights.

    Attributes:
        shape: name.
        kind: of weights.
        plan: of the decode kernel.
        matrix: name.
    """

    shape: str
    kind: str
    plan: Plan
    matrix: str

    @property
    def operation(self) -> Operation:
        """Its multiply."""
        return self.plan.image.operation(0, self.matrix)

    def forms(self, tokens: int) -> Iterator[Form]:
        """Variants that are timed for so many tokens."""
        out = Out.ARRANGED if self.matrix == "gate_up" else Out.VALUES
        widths = [w for w in WIDTHS[1:] if w <= tokens and 16 * w >= tokens]
        for width in widths:
            form = form_of(self.operation.matrix, self.plan.dtype, width, out)
            form = replace(form, eight_bits=self.kind == EIGHT_BITS)
            yield form
            yield replace(form, groups=1)
            yield from (replace(form, token_slots=n) for n in TOKEN_SLOTS if n != form.token_slots)
            if out is Out.ARRANGED and width == tokens <= MOST_PARTED_TOKENS:
                # Any number of fragments a tile; what arranges the neurons comes on top.
                yield replace(form, out=Out.GATED)
            if tokens > MOST_PARTED_TOKENS or out is Out.ARRANGED or width < tokens:
                continue
            for parts in parts_of(form.columns)[1:]:
                yield replace(form, out=Out.WIDE, parts=parts)


def main(given: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=(128, 2048))
    parser.add_argument("--compile", action="store_true", help="kernels into the cache, no GPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="then no matrix is begun")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args(given)
    if asked.compile:
        return _compile(asked.shapes, asked.kinds, asked.tokens)
    end, rows = time.monotonic() + asked.seconds, []
    for shape in asked.shapes:
        for tokens in asked.tokens:
            rows += _measured(shape, asked.kinds, tokens, end)
    if asked.output:
        asked.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _cases(shape: str, kind: str) -> list[Case]:
    plan = _plan(shape, kind)
    return [Case(shape, kind, plan, matrix) for matrix in MATRICES]


def _plan(shape: str, kind: str) -> Plan:
    config = read_config(_FOLDER / f"{shape}.json")
    made: Shape = rounded_shape(config, Dtype.BF16, Rounding(KINDS[kind], None))
    plan = support_of(TYPICAL[ARCH], made.config, Dtype.BF16, 1, made.stored).plan
    assert plan is not None, "the decode kernel runs these shapes"
    return plan


def _compile(shapes: Sequence[str], kinds: Sequence[str], tokens: Sequence[int]) -> int:
    sources = {}
    for shape in shapes:
        config = read_config(_FOLDER / f"{shape}.json")
        for source in prefill_sources(config, Dtype.BF16, ARCH).all:
            sources[source.header, source.kernel] = source
        for kind in kinds:
            for case in _cases(shape, kind):
                for count in tokens:
                    for form in case.forms(count):
                        sources[form.source.header, form.source.kernel] = form.source
            rows = _rows_source(_plan(shape, "bf16"))
            quantize = quantize_source(Dtype.BF16)
            for source in (rows, quantize):
                sources[source.header, source.kernel] = source
    cache = read_settings().cache
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: load_or_build(source, ARCH, cache), sources.values()))
    print(f"{len(sources)} kernels in {cache} after {time.monotonic() - start:.0f} s")
    return 0


def _rows_source(plan: Plan):  # noqa: ANN202 - Source
    head = plan.image.head.matrix
    return rows_source(head.format, plan.dtype, head.steps)


def _measured(shape: str, kinds: Sequence[str], tokens: int, end: float) -> list[dict[str, object]]:
    """Rows of one shape, printed as they come: library, arranging, and every variant."""
    found: list[dict[str, object]] = []
    for matrix in MATRICES:
        if time.monotonic() > end:
            print("stopped: no time left")
            break
        found += _of_matrix(shape, matrix, kinds, tokens)
    return found


def _of_matrix(
    shape: str, matrix: str, kinds: Sequence[str], tokens: int
) -> list[dict[str, object]]:
    config = read_config(_FOLDER / f"{shape}.json")
    layers, plan = min(config.num_layers, _LAUNCHES), _plan(shape, "bf16")
    own = plan.image.operation(0, matrix).matrix
    x = torch.randn(tokens, own.columns, device=_DEVICE).to(torch.bfloat16)
    library = _library_us(config, matrix, own.rows, x, layers)
    arranged, arranging = torch.empty_like(x), PackedRows(_rows_source(plan), read_settings().cache)
    arrange = _per_launch_us(lambda _: arranging.arrange(x, None, arranged, _stream()), layers)
    codes, scales = torch.empty_like(x, dtype=torch.uint8), torch.ones(tokens + 1, device=_DEVICE)
    quantizing = PackedQuantize(Dtype.BF16, read_settings().cache)
    quantize = _per_launch_us(
        lambda _: quantizing(arranged, None, codes, scales, _stream(), arranged=True), layers
    )
    line = f"{shape:22} {matrix:16} T={tokens:<5} library {library:7.1f}  arrange {arrange:5.1f}"
    line += f"  quantize {quantize:5.1f}"
    found: list[dict[str, object]] = []
    for kind in kinds:
        case = next(c for c in _cases(shape, kind) if c.matrix == matrix)
        given = (codes, scales) if kind == EIGHT_BITS else (arranged, None)
        timed = sorted(_packed(case, *given, layers))
        best, how = timed[0]
        line += f" | {kind} {best:7.1f} ({best / library:4.2f}) {how:12}"
        found += [
            {
                "shape": shape, "matrix": matrix, "tokens": tokens, "kind": kind,
                "library_us": library, "arrange_us": arrange, "quantize_us": quantize,
                "variant": variant, "us": us,
            }
            for us, variant in timed
        ]  # fmt: skip
    print(line, flush=True)
    return found


def _packed(
    case: Case, x: Tensor, scales: Tensor | None, layers: int
) -> Iterator[tuple[float, str]]:
    """Microseconds of every variant, and which it is; parts are added within these."""
    plan, operation, cache = case.plan, case.operation, read_settings().cache
    image, tokens = _random_image(plan, layers), len(x)
    beside = PackedRows(_rows_source(_plan(case.shape, "bf16")), cache)
    for form in case.forms(tokens):
        gated = is_gated(form.out)
        pieces = fragments(plan.shape, operation, plan.image.block_stride, gated=gated)
        results = operation.matrix.rows // (2 if gated else 1)
        out = torch.empty(tokens, results, dtype=torch.bfloat16, device=_DEVICE)
        shape = (form.parts, tokens, results)
        parts = torch.empty(shape, dtype=torch.float32, device=_DEVICE) if form.parts > 1 else None
        kernel = PackedProduct(form, cache)
        bits, token_tiles = operation.matrix.format.value_bits, -(-tokens // form.tokens)
        even = best_shares(
            Load(len(pieces), form.columns, bits, form.tokens, token_tiles, form.eight_bits),
            plan.gpu.num_sms, parts=(form.parts,),
            multiple=GROUP_FRAGMENTS if form.out is Out.ARRANGED else 1,
        ).rows  # fmt: skip
        if even.each > form.fragments:
            even = RowCut(form.fragments)
        for rows in dict.fromkeys((even, RowCut(form.fragments))):
            tiling, words = tiled(pieces, rows, results)
            launch = _Launch(case, image, kernel, on_device(words, x.device), tiling, scales)
            how = f"{form.tokens}x{form.groups}s{form.token_slots}+{form.weight_slots}/{rows.each}"
            how += f"*{rows.whole}+{rows.rest}" if rows.rest else ""
            how += "g" if form.out is Out.GATED else ""
            yield (
                _per_launch_us(partial(launch, x, out, parts, beside), layers),
                how + (f"/{form.parts}" if form.parts > 1 else ""),
            )


class _Launch(NamedTuple):
    """A product of one variant, by the layer's matrix."""

    case: Case
    image: Tensor
    kernel: PackedProduct
    table: Tensor
    tiling: Tiling
    scales: Tensor | None

    def __call__(
        self, x: Tensor, out: Tensor, parts: Tensor | None, beside: PackedRows, layer: int
    ) -> None:
        place = self.case.plan.image.matrix_offset(layer, self.case.matrix)
        to = out if parts is None else parts
        address, stream = self.image.data_ptr() + place, _stream()
        self.kernel.launch(x, address, self.table, self.tiling, to, stream, self.scales)
        if parts is not None:
            beside.add_parts(parts, out, stream)


def _random_image(plan: Plan, layers: int) -> Tensor:
    """Weights of so many layers; bytes of codes are any, of values in 16 bits random numbers."""
    blocks, stride = plan.grid_blocks, plan.image.block_stride
    image = torch.zeros(blocks, stride, dtype=torch.uint8, device=_DEVICE)
    used = plan.image.layer_offset(layers) if layers < plan.shape.num_layers else stride
    part = image[:, : used // 2 * 2]
    if plan.formats:
        # Neither scales nor codes that are no numbers.
        part.random_(0, 0x3F)
    else:
        part.view(torch.bfloat16).normal_()
    return image


def _library_us(config, matrix: str, rows: int, x: Tensor, layers: int) -> float:  # noqa: ANN001
    """What prompts take now: the library, or our kernel of gate_up; SwiGLU included."""
    tokens, columns = x.shape
    weights = [
        torch.randn(rows, columns, device=_DEVICE, dtype=torch.float32).to(x.dtype)
        for _ in range(min(layers, 4))
    ]
    out = torch.empty(tokens, rows, dtype=x.dtype, device=_DEVICE)
    if matrix != "gate_up":
        return _per_launch_us(lambda i: torch.mm(x, weights[i % len(weights)].mT, out=out), layers)
    cache, sources = read_settings().cache, prefill_sources(config, Dtype.BF16, ARCH)
    activated = torch.empty(tokens, rows // 2, dtype=x.dtype, device=_DEVICE)
    own = sources.gate_up.get(rows // 2)
    if own is not None and GateUp.suits(x, weights[0]):
        kernel = GateUp(own, cache)
        return _per_launch_us(
            lambda i: kernel.launch(x, weights[i % len(weights)], activated, _stream()), layers
        )
    silu = Kernels(sources.swiglu[rows // 2], ["silu_mul"], ARCH, cache, x.device)
    count = activated.numel() // 8

    def both(i: int) -> None:
        torch.mm(x, weights[i % len(weights)].mT, out=out)
        args = (pointer(out), pointer(None), pointer(activated), ctypes.c_uint32(count))
        silu.launch("silu_mul", -(-count // THREADS), args, _stream())

    return _per_launch_us(both, layers)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _per_launch_us(launch: Callable[[int], object], layers: int) -> float:
    """Median over replays of a graph in which layers take turns."""
    for layer in range(2):
        launch(layer % layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(_LAUNCHES):
            launch(i % layers)
    taken = []
    for _ in range(_REPLAYS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        time.sleep(_REST_S)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop) * 1e3 / _LAUNCHES)
    return median(taken[1:])


if __name__ == "__main__":
    raise SystemExit(main())
