"""Lists the kernels that GPU tests compile, on a machine without a GPU, and compiles them.

    export PYTHONPATH=src:tests
    python -m pytest -p kernel_sources --list-kernels LISTED -m "gpu and not timed" tests
    python -m kernel_sources LISTED .kernels

Compiling takes more time than the tests do, and a GPU's time is dear. Tests run with a stand-in for
the GPU, whose memory is the host's. Weights are not packed and nothing is multiplied, so most tests
fail, which means nothing; a test that takes too long is ended. What builds a test would have asked
for after that is compiled when it runs.
"""

import json
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

ARCH = "sm_90a"
_SECONDS = 12
_MOST_VALUES = 20_000_000_000  # of one tensor, whose pages are not touched
_PRODUCTS = {
    "addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "scaled_dot_product_attention",
    "__matmul__",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-kernels", type=Path, metavar="FOLDER", required=True)


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--list-kernels").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    stand_in_for_torch()
    stand_in_for_driver()
    stand_in_for_compiler(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    def stop(*_) -> None:
        raise TimeoutError(item.nodeid)

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        with OnHost():
            return (yield)
    finally:
        signal.alarm(0)


class OnHost(TorchFunctionMode):
    """Tensors of a GPU lie in the host's memory; random ones and products are what lies there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in {"cuda", "pin_memory"}:
            return args[0]
        if name == "is_pinned":
            return True
        args = tuple(map(on_host, args))
        kwargs = {k: on_host(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        if name in {"empty", "zeros", "ones", "full", "randn", "rand", "randint"}:
            require_small(args)
        if name in {"randn", "rand"}:
            kwargs.pop("generator", None)
            func = torch.empty
        return unfilled(func, args, kwargs) if name in _PRODUCTS else func(*args, **kwargs)


def on_host(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def require_small(args) -> None:
    count = 1
    for size in args[0] if args and isinstance(args[0], (tuple, list)) else args:
        count *= size if isinstance(size, int) else 1
    if count > _MOST_VALUES:
        raise MemoryError(f"{count:,} values")


def unfilled(func, args, kwargs):
    """A result of the right shape and type."""
    if "out" in kwargs:
        return kwargs["out"]
    with torch._C.DisableTorchFunction():
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        made = func(*args, **kwargs)
        return torch.empty(made.shape, dtype=made.dtype)


class Anything:
    """Takes any call, and answers with itself."""

    cuda_stream = 0

    def __init__(self, *_, **__) -> None: ...

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args) -> None: ...


class Event(Anything):
    def query(self) -> bool:
        return True

    def elapsed_time(self, _) -> float:
        return 1.0


class Generator(torch.Generator):
    """Of the host; a class, since libraries name it in types."""

    def __new__(cls, *_, **__):
        return super().__new__(cls)


class Module(Anything):
    num_sms = 132

    def max_active_blocks(self, *_) -> int:
        return 1


def stand_in_for_torch() -> None:
    """`torch.cuda` of a machine with eight H200s."""
    card = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=50 << 20,
        total_memory=141 << 30, shared_memory_per_block_optin=227 * 1024, uuid="0",
    )  # fmt: skip
    facts = {
        "is_available": True, "device_count": 8, "current_device": 0, "memory_allocated": 0,
        "max_memory_allocated": 0, "get_device_properties": card, "get_device_name": card.name,
        "get_device_capability": (9, 0), "mem_get_info": (130 << 30, 141 << 30),
        "device": nullcontext(), "stream": nullcontext(), "graph": nullcontext(),
        "current_stream": Anything(), "synchronize": None, "empty_cache": None, "set_device": None,
        "reset_peak_memory_stats": None, "_sleep": None,
    }  # fmt: skip
    for name, value in facts.items():
        setattr(torch.cuda, name, partial(lambda value, *_, **__: value, value))
    torch.cuda.Stream = torch.cuda.CUDAGraph = Anything
    torch.cuda.Event = Event
    torch.Generator = Generator
    run = threading.Thread.run

    def run_on_host(self) -> None:
        with OnHost():
            run(self)

    threading.Thread.run = run_on_host


def stand_in_for_driver() -> None:
    """In this order: a module takes from earlier ones what it calls by name."""
    from soloist.jit import bindings, compiler, module, tensor_map, wake

    bindings.driver, wake.driver = Anything, lambda: None
    module.Module = Module
    tensor_map._encoded = lambda *_: tensor_map.TensorMap()
    compiler.require_clean = lambda *_, **__: compiler.Resources()
    from soloist.parallel import peers

    peers.allow_access, peers.can_access = lambda _: None, lambda *_: True
    from soloist.megakernel.decoder import Decoder

    Decoder._measure_embedding = lambda _: 1.0
    Decoder._rounds = lambda _: iter(range(64))


def stand_in_for_compiler(folder: Path) -> None:
    """What would be compiled is written down. Weights are not packed."""
    from soloist.jit import cache, compiler
    from soloist.jit.compiler import Cubin, Report, Resources

    class Entries(dict):
        def get(self, *_):
            return Resources(registers=32)

    def write(source, arch):
        place = folder / f"{source.digest(arch, (), (0, 0))}.json"
        if not place.exists() and arch == ARCH and source.root == cache.Source.root:
            ours = place.with_suffix(f".{os.getpid()}")
            ours.write_text(json.dumps({"kernel": source.kernel, "header": source.header}))
            ours.rename(place)
        return Cubin(b"", Report(Entries(), ()), "", arch)

    cache.compile_source = compiler.compile_source = write
    cache._keep = lambda _, __, built, ___: built
    from soloist.engine import kernel
    from soloist.weights import packed

    packed.pack_weights = kernel.pack_weights = unpacked


def unpacked(plan, weights, *_, keep_rows=False):
    """Zeros in the place of packed weights: no page of them is ever touched."""
    from soloist.model.torch_types import TORCH_DTYPES
    from soloist.weights.packed import PackedWeights

    layout, model, table = plan.image, plan.model, None
    if not plan.share.tied_head:
        table = torch.zeros(model.vocab_size, model.hidden_size, dtype=TORCH_DTYPES[plan.dtype])
    experts = torch.zeros(layout.experts_bytes, dtype=torch.uint8) if plan.has_experts else None
    image = torch.zeros(plan.grid_blocks, layout.block_stride, dtype=torch.uint8)
    if not keep_rows:
        weights.clear()
    vectors = torch.zeros(plan.shape.vector_lanes * layout.vector_values)
    return PackedWeights(image, vectors, table, experts)


def compiled(listed: Path, kernels: Path) -> str:
    """What went wrong, if anything."""
    from soloist.jit.cache import load_or_build
    from soloist.jit.source import Source

    try:
        load_or_build(Source(**json.loads(listed.read_text())), ARCH, kernels)
    except Exception as error:  # noqa: BLE001 - told, and the others go on
        return f"{listed.name}: {error}"
    return ""


def main(listed: str, kernels: str) -> int:
    """Compile what was listed, as many at once as there are processors; exit status."""
    files = sorted(Path(listed).glob("*.json"), key=lambda file: -file.stat().st_size)
    with ProcessPoolExecutor() as pool:
        said = [text for text in pool.map(partial(compiled, kernels=Path(kernels)), files) if text]
    print(f"{len(files) - len(said)} of {len(files)} kernels are in {kernels}", *said, sep="\n")  # noqa: T201
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
