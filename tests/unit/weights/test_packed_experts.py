"""Experts get from files into the kernel's order without a second copy of them anywhere."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from interpreter.mixtures import MIXTURES, SMS, wide_experts
from interpreter.models import gpu
from interpreter.quantised import alike, quantised
from live_bytes import LiveBytes
from soloist.engine.memory import Footprint, stage
from soloist.megakernel.plan import Plan, make_plan
from soloist.model.checkpoint import open_checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.families.dense import decoder_tensors
from soloist.model.folder import CONFIG_FILE
from soloist.model.quantized import AT_LOAD
from soloist.model.torch_types import Weights
from soloist.parallel.share import part_of
from soloist.weights.choice import Rounding, choose
from soloist.weights.distribution import distribute
from soloist.weights.formats import formats_of
from soloist.weights.loading import Destination, Source, load_ranks, regrouped
from soloist.weights.memory import packed_bytes
from soloist.weights.packed import EXPERTS, ExpertPacker, pack_weights
from soloist.weights.random import random_tensors
from soloist.weights.sharding import shard_all
from unit.prefill.models import random_weights

CPU = torch.device("cpu")


def packed_as_before(plan: Plan, config: ModelConfig, whole: Weights, rank: int) -> Tensor:
    """A rank's experts, packed from rows that all lie there."""
    packed = pack_weights(plan, shard_all(part_of(config, plan.ranks, rank), whole), CPU)
    assert packed.experts is not None
    return packed.experts


@pytest.mark.parametrize("stays_on_host", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_packed_as_they_come(name: str, ranks: int, stays_on_host: bool) -> None:
    """In any order, on every rank; all else comes as ever."""
    config = MIXTURES[name]
    plan, whole = make_plan(config, Dtype.BF16, gpu(SMS), ranks), random_weights(config)
    given = list(whole.items())
    random.Random(ranks).shuffle(given)
    shares = distribute(given, config, [CPU] * ranks, stays_on_host=stays_on_host, plan=plan)
    for rank, own in enumerate(shares):
        wanted = shard_all(part_of(config, ranks, rank), whole)
        assert own.keys() == {EXPERTS} | {key for key in wanted if ".experts." not in key}
        assert all(torch.equal(own[key], wanted[key]) for key in own if key != EXPERTS)
        experts = packed_as_before(plan, config, whole, rank)
        assert torch.equal(own[EXPERTS], experts)
        packed = pack_weights(plan, own, CPU)
        assert packed.experts is not None
        assert torch.equal(packed.experts, experts)
        assert not own, "everything was taken"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["fp8-block", "int4-zeros", "int8"])
def test_parts_of_a_matrix_wait_for_each_other(kind: str, ranks: int) -> None:
    config = MIXTURES["some layers dense"] if ranks == 1 else wide_experts(256)
    stored = alike(config, kind)
    formats = formats_of(stored, config, ranks)
    assert formats.keys() >= {key for key in stored if ".experts." in key}
    plan = make_plan(config, Dtype.BF16, gpu(SMS), ranks, formats)
    parts, _ = quantised({k: v.float() for k, v in random_weights(config).items()}, stored)
    whole = dict(regrouped(parts.items(), decoder_tensors(config), stored, formats))
    given = list(whole.items())
    random.Random(ranks).shuffle(given)
    shares = distribute(given, config, [CPU] * ranks, stays_on_host=False, plan=plan)
    for rank, own in enumerate(shares):
        assert torch.equal(own[EXPERTS], packed_as_before(plan, config, whole, rank))


def test_what_lacks_or_comes_twice_is_a_mistake() -> None:
    config = MIXTURES["softmax"]
    plan, whole = make_plan(config, Dtype.BF16, gpu(SMS)), random_weights(config)
    packer, names = ExpertPacker(plan, CPU), [name for name in whole if ".experts." in name]
    assert sorted(packer.names()) == sorted(names)
    assert all(map(packer.takes, names))
    assert not any(map(packer.takes, whole.keys() - set(names)))
    for name in names[1:]:
        packer.add(name, whole[name])
    with pytest.raises(AssertionError, match="1 tensors of experts were not added"):
        packer.packed()
    with pytest.raises(AssertionError, match="not again"):
        packer.add(names[1], whole[names[1]])


def test_live_bytes_are_those_of_tensors_that_are_alive() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000, dtype=torch.uint8)
        view = first[:10]
        second = first + 1
        assert live.now_bytes == 2000
        del first
        assert live.now_bytes == 2000, "a view keeps all of it"
        del view, second
        torch.zeros(3)
    assert (live.now_bytes, live.most_bytes) == (0, 2000)


# From files ---------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "vocab_size": 512,
    "torch_dtype": "bfloat16", "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ONE_EXPERT = 3 * 512 * 512  # values
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same mixture of 50 M parameters in bf16 and in blocks of FP8."""
    made = {}
    for kind in ("bf16", "fp8"):
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        values = VALUES | ({"quantization_config": BLOCKS} if kind == "fp8" else {})
        (folder / CONFIG_FILE).write_text(json.dumps(values))
        save_file(_stored(folder, kind), folder / "model.safetensors")
    return made


def _stored(folder: Path, kind: str) -> dict[str, Tensor]:
    stored = {}
    for spec in tensors(read_config(folder / CONFIG_FILE)):
        ((_, whole),) = random_tensors([spec], Dtype.BF16, CPU, seed=len(stored))
        rows = [source.shape[0] for source in spec.sources]
        for source, values in zip(spec.sources, whole.split(rows), strict=True):
            if kind == "fp8" and spec.is_layer_matrix:
                stored[source.name] = (values.float() * 16).to(torch.float8_e4m3fn)
                blocks = [-(-size // 128) for size in source.shape]
                scales = torch.full(blocks, 1 / 16, dtype=torch.float32)
                stored[f"{source.name}_scale_inv"] = scales
            else:
                stored[source.name] = values.bfloat16().clone()
    return stored


def loaded(folder: Path, rounding: Rounding) -> tuple[Plan, int, LiveBytes]:
    """The plan, what the estimate says of weights and what is beside them, and what was alive."""
    checkpoint, config = open_checkpoint(folder), read_config(folder / CONFIG_FILE)
    chosen = choose(checkpoint, config, tensors(config), rounding)
    formats = formats_of(chosen.stored, chosen.config)
    plan = make_plan(chosen.config, Dtype.BF16, gpu(16), formats=formats)
    source = Source(checkpoint, chosen.config, chosen.specs, chosen.stored, chosen.rounding)
    to = Destination((CPU,), Dtype.BF16, True, False, formats, plan=plan)
    beside = stage(chosen.specs, Dtype.BF16, plan, 1 << 40).bytes
    needs = Footprint(chosen.config, chosen.specs, Dtype.BF16, plan).estimate(64)
    with LiveBytes() as live:
        (weights,), _ = load_ranks(source, to, lambda _: None)
        packed = pack_weights(plan, weights, CPU)
    assert packed.experts is not None
    assert live.most_bytes <= needs.total_bytes + beside, "the estimate is true"
    assert needs.weights_bytes == packed_bytes(plan)
    return plan, needs.weights_bytes + beside, live


@pytest.mark.parametrize(
    ("kind", "codes"), [*(("bf16", codes) for codes in (None, *AT_LOAD)), ("fp8", None)]
)
def test_there_is_one_copy_of_experts_at_any_time(
    kind: str, codes: str | None, folders: dict[str, Path]
) -> None:
    """Beside it come all other weights, and a few forms of one matrix. Also what `--weights`
    rounds is never there in 16 bits as a whole."""
    rounding = Rounding(None if codes is None else AT_LOAD[codes])
    plan, held_bytes, live = loaded(folders[kind], rounding)
    # Of one matrix, not of an expert: in fp32, as bytes, in steps, in tiles.
    on_its_way = 16 * ONE_EXPERT * 2 // 3
    assert live.most_bytes <= held_bytes + on_its_way
    assert on_its_way < plan.image.experts_bytes / 2, "a second copy would show"


_BOUNDED = """
import sys
from pathlib import Path

import torch

from interpreter.models import gpu
from soloist.megakernel.plan import make_plan
from soloist.model.checkpoint import open_checkpoint
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.weights.loading import Destination, Source, load_ranks
from soloist.weights.packed import EXPERTS

torch.set_num_threads(1)


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
checkpoint, config = open_checkpoint(folder), read_config(folder / "config.json")
plan = make_plan(config, Dtype.BF16, gpu(16), ranks)
cpu = torch.device("cpu")
to = Destination((cpu,) * ranks, Dtype.BF16, True, stays_on_host=ranks > 1, plan=plan)
before = most = anonymous_bytes()


def look(progress):
    global most
    most = max(most, anonymous_bytes())


weights, _ = load_ranks(Source(checkpoint, config, tensors(config)), to, look)
print(most - before - sum(own[EXPERTS].numel() for own in weights))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells it")
@pytest.mark.parametrize("ranks", [1, 2])
def test_files_may_be_larger_than_the_hosts_memory(ranks: int, folders: dict[str, Path]) -> None:
    """Nothing of 100 MB of experts is held but what is packed, here in the place of GPUs; the
    system may let go of the files."""
    assert (folders["bf16"] / "model.safetensors").stat().st_size > 100e6
    script = [sys.executable, "-c", _BOUNDED, str(folders["bf16"]), str(ranks)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        script, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50e6
