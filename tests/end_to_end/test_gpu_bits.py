"""The bits of logits and tokens are those that were recorded: a change of design changes none.

Recorded are hashes by kind of GPU, of one compiler and one torch: its libraries multiply prompts,
and have other bits on some kinds. Elsewhere these tests are skipped. Workers need `--dist
loadgroup`, so that one alone has the large shapes. A change that means to change bits records them
anew:

    pytest tests/end_to_end/test_gpu_bits.py --record-bits -n 8 --dist loadgroup
"""

import fcntl
import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter import lane_models
from interpreter.models import CASES, CONTEXT, configured, prompt
from plan.shapes import LANEFORMER, SHAPES
from soloist.bench.agreement import forced_logits, require_same_bits
from soloist.bench.subject import Reading, rounded_shape, shape_on_gpu
from soloist.engine import Engine, EngineConfig
from soloist.engine.core import tokens_of
from soloist.engine.gpus import Placement
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.request import Request
from soloist.jit.compiler import nvrtc_version
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.torch_types import TORCH_DTYPES
from soloist.sampling import Sampler, SamplingParams
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

pytestmark = pytest.mark.gpu

RECORDED = Path(__file__).with_name("bits.json")
RANKS = (1, 2, 4, 8)
FORCED_TOKENS, ROUNDS, PROMPT_TOKENS, NEW_TOKENS = 96, 40, 100, 32
# The hashes guard the decode kernel. Tokens that follow a prompt were recorded where a library
# multiplies and attends; kernels of ours, which prompts have on Hopper, give keys and values other
# last bits.
CAPACITY = Capacity(CONTEXT, page_attention=False)
READING = Reading(packed_prompts=False, page_attention=False)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = replace(
    GREEDY, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=7
)
DENSE = ("llama-3.2-1b", "qwen3-1.7b", "laneformer-2b-as-llama", "llama-3.1-8b")
LANE_CASES = ("mean of lanes", "sum before norm", "vocabulary slices", "no early sum")


def libraries() -> dict[str, str]:
    """What bits may depend on, beside the kind of GPU."""
    return {"nvrtc": ".".join(map(str, nvrtc_version())), "torch": torch.__version__}


def hashed(content: Tensor | list[int]) -> str:
    data = (
        content.cpu().numpy().tobytes() if isinstance(content, Tensor) else repr(content).encode()
    )
    return sha256(data).hexdigest()[:16]


def bits(model: KernelModel, vocab_size: int, ids: list[int]) -> dict[str, str]:
    """Hashes of what a model makes of some tokens."""
    one = forced_logits(model.decoder, vocab_size, ids[:FORCED_TOKENS], 1, ROUNDS)
    several = forced_logits(model.decoder, vocab_size, ids[:FORCED_TOKENS], MAX_QUERIES, ROUNDS)
    assert torch.isfinite(one).all(), "finite logits"
    require_same_bits(f"{MAX_QUERIES} queries", one, several)
    found = {"logits": hashed(one)}
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        sampler = Sampler(params, vocab_size, ids)
        found[name] = hashed(list(tokens_of(model, Request(ids, sampler))))
    return found


def compare(name: str, found: dict[str, str], config: pytest.Config) -> None:
    """Hold a model's hashes against the recorded ones, or record them."""
    device = torch.cuda.get_device_name()
    if not config.getoption("--record-bits"):
        recorded = json.loads(RECORDED.read_text("utf-8"))
        if recorded["libraries"] != libraries():
            pytest.skip(f"recorded with {recorded['libraries']}, here are {libraries()}")
        if name not in recorded["bits"].get(device, {}):
            pytest.skip(f"not recorded on {device} yet: --record-bits")
        assert found == recorded["bits"][device][name], "meant? see the head of this file"
        return
    with RECORDED.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several workers write
        file.seek(0)
        bits_of = json.loads(file.read() or "{}").get("bits", {})
        bits_of[device] = dict(sorted({**bits_of.get(device, {}), name: found}.items()))
        file.truncate(0)
        now = {"libraries": libraries(), "bits": bits_of}
        file.write(json.dumps(now, indent=1) + "\n")


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Other workers have models on the same card."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def on_one_card(ranks: int) -> tuple[torch.device, ...]:
    return (torch.device("cuda", torch.cuda.current_device()),) * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_families(name, ranks, tmp_path, request) -> None:
    config, plan = configured(name, tmp_path, ranks=ranks)
    found = {}
    for dtype in (Dtype.BF16, Dtype.FP16):
        plan = make_plan(config, dtype, plan.gpu, ranks)
        whole = {k: v.to("cuda", TORCH_DTYPES[dtype]) for k, v in random_weights(config).items()}
        weights = [shard_all(plan.part_of(rank), whole) for rank in range(ranks)]
        model = load_kernel(plan, weights, on_one_card(ranks), CAPACITY, None, keep_rows=True)
        model.prepare()
        ids = prompt(config, PROMPT_TOKENS)
        found |= {f"{dtype.value} {k}": v for k, v in bits(model, config.vocab_size, ids).items()}
    compare(f"{name}, {ranks} ranks", found, request.config)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", LANE_CASES)
def test_lanes(name, ranks, tmp_path, request) -> None:
    config, plan, weights = lane_models.configured(name, tmp_path, ranks)
    whole = {k: v.to("cuda", torch.bfloat16) for k, v in weights.items()}
    parts = [shard_all(plan.part_of(rank), whole) for rank in range(ranks)]
    model = load_kernel(plan, parts, on_one_card(ranks), CAPACITY, None, keep_rows=True)
    model.prepare()
    found = bits(model, config.vocab_size, prompt(config, PROMPT_TOKENS))
    compare(f"lanes: {name}, {ranks} ranks", found, request.config)


@pytest.mark.parametrize("ranks", RANKS)
def test_etude(ranks, request) -> None:
    where = {"rank_devices": (0,) * ranks} if ranks > 1 else {}
    engine = Engine.load(
        EngineConfig(
            "etude", "cuda", context_tokens=256, packed_prompts=False, page_attention=False, **where
        )
    )
    ids = prompt(engine.config, PROMPT_TOKENS)
    found = bits(engine.model, engine.config.vocab_size, ids)
    compare(f"etude, {ranks} ranks", found, request.config)


def shapes() -> Iterator[object]:
    """(shape, precision, ranks); one worker has all of a shape, so that they fit the card."""
    for file in (*(SHAPES[name] for name in DENSE), LANEFORMER):
        usual = Dtype.FP16 if file == LANEFORMER else Dtype.BF16
        other = Dtype.BF16 if file == LANEFORMER else Dtype.FP16
        for dtype, ranks in (*((usual, ranks) for ranks in RANKS), (other, 1)):
            yield pytest.param(file, dtype, ranks, marks=pytest.mark.xdist_group(file.stem))


@pytest.mark.parametrize(
    ("file", "dtype", "ranks"),
    list(shapes()),
    ids=lambda v: v.stem if isinstance(v, Path) else None,
)
def test_shapes(file, dtype, ranks, request) -> None:
    config, placed = read_config(file), Placement(on_one_card(ranks))
    name = f"{file.stem} {dtype.value}, {ranks} ranks"
    support = placed.support(config, dtype)
    if support.plan is None:
        compare(name, {"refused": support.refusal}, request.config)
        return
    model = shape_on_gpu(rounded_shape(config, dtype), 256, placed, reading=READING)
    found = bits(model, config.vocab_size, prompt(config, PROMPT_TOKENS))
    compare(name, found, request.config)
