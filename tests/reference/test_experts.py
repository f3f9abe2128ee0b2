"""Families with mixtures of experts against transformers, and what a router chooses."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference.compare import assert_close
from reference.oracle import Case, build, load, oracle_logits, prompt, run, save
from soloist.device import HEADROOM_BYTES
from soloist.engine.config import EngineConfig, Resolved, resolve
from soloist.errors import (
    CheckpointError,
    MissingTensor,
    NotFinite,
    OutOfMemory,
    UnexpectedTensor,
)
from soloist.model.checkpoint import open_checkpoint
from soloist.model.config import Router
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import shipped_folder
from soloist.model.quantized import Codes
from soloist.reference import experts
from soloist.reference.blocks import MlpBlock, Step
from soloist.reference.build import build_reference
from soloist.reference.device import Reference
from soloist.reference.experts import MixtureBlock
from soloist.reference.threads import Threads
from soloist.weights.choice import Chosen, Rounding, choose, held_tensors, left_in_files
from soloist.weights.reading import Forms, load_weights

GQA = {"num_attention_heads": 10, "num_key_value_heads": 2, "hidden_size": 40, "vocab_size": 97}
QWEN: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "mlp_only_layers": [],
}  # fmt: skip
QWEN2 = {**QWEN, "shared_expert_intermediate_size": 22}
OLMOE = {"num_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": 3}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GLM: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 14, "head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip

CASES = [
    Case("plain", "qwen3_moe", {**QWEN, "head_dim": 8}),
    Case("normalised-sharded", "qwen3_moe", {
        **GQA, **QWEN, "head_dim": 18, "norm_topk_prob": True, "attention_bias": True,
    }, sharded=True),
    Case("every-other-layer", "qwen3_moe", {
        **QWEN, "head_dim": 8, "num_hidden_layers": 5, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "rope_parameters": YARN,
    }, old_rope=True),
    Case("window-tied", "qwen3_moe", {
        **QWEN, "head_dim": 8, "use_sliding_window": True, "sliding_window": 16,
        "tie_word_embeddings": True,
    }),
    Case("all-of-them", "qwen3_moe", {**QWEN, "head_dim": 8, "num_experts_per_tok": 6}),
    Case("shared", "qwen2_moe", QWEN2),
    Case("listed-window", "qwen2_moe", {
        **GQA, **QWEN2, "norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": True,
        "sliding_window": 16, "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }, sharded=True),
    Case("plain", "olmoe", OLMOE),
    Case("gqa-biases-normalised", "olmoe", {
        **GQA, **OLMOE, "num_key_value_heads": 5, "attention_bias": True, "norm_topk_prob": True,
    }, old_rope=True),
    Case("plain", "mixtral", MIXTRAL),
    Case("window-head-dim", "mixtral", {
        **GQA, **MIXTRAL, "sliding_window": 16, "head_dim": 12, "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
    }, sharded=True),
    Case("plain", "glm4_moe", GLM),
    Case("groups-scaled", "glm4_moe", {
        **GQA, **GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2,
    }, sharded=True),
    Case("unnormalised", "glm4_moe", {
        **GLM, "norm_topk_prob": False, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
    }),
]  # fmt: skip


def random_case(seed: int) -> Case:
    """Any family, any sizes."""
    draw = random.Random(seed)
    family = draw.choice(["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe"])
    kv_heads = draw.choice([1, 2, 3])
    heads, groups = kv_heads * draw.choice([1, 2, 5]), draw.choice([1, 2, 3])
    experts = groups * draw.randint(2, 9)
    kept = draw.randint(1, groups)
    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * draw.choice([4, 8]),
        "intermediate_size": draw.randint(9, 40),
        "num_hidden_layers": draw.randint(1, 4),
        "vocab_size": draw.randint(40, 130),
        "tie_word_embeddings": draw.random() < 0.5,
        "num_experts_per_tok": draw.randint(1, kept * experts // groups),
        "norm_topk_prob": draw.random() < 0.5,
    }
    if family in {"qwen3_moe", "qwen2_moe", "glm4_moe"}:
        fields["moe_intermediate_size"] = draw.randint(5, 30)
    if family in {"qwen3_moe", "qwen2_moe"}:
        fields["mlp_only_layers"] = draw.choice([[], [0]])
    if family == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = draw.randint(5, 30)
    if family == "glm4_moe":
        fields |= {"n_routed_experts": experts, "n_group": groups, "topk_group": kept}
        fields |= {"head_dim": 4 * draw.randint(1, 4), "use_qk_norm": draw.random() < 0.5}
    else:
        fields["num_local_experts" if family == "mixtral" else "num_experts"] = experts
    if family == "mixtral":
        del fields["norm_topk_prob"]  # always
    return Case(f"random-{seed}", family, fields, draw.random() < 0.5, draw.random() < 0.5)


Loaded = tuple[Reference, Tensor, Tensor]


@pytest.fixture(
    scope="module", params=CASES + [random_case(i) for i in range(12)], ids=lambda c: c.id
)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    case: Case = request.param
    oracle = build(case)
    model = load(save(oracle, case, tmp_path_factory.mktemp("model")))
    ids = prompt(300, oracle.config.vocab_size)
    return model, ids, oracle_logits(oracle, ids)


def test_one_prefill_gives_all_rows(loaded: Loaded) -> None:
    model, ids, wanted = loaded
    assert_close(run(model, ids, [300]), wanted, "transformers", "one prefill")


def test_uneven_chunks_give_the_same_rows(loaded: Loaded) -> None:
    model, ids, wanted = loaded
    chunks = [1, 7, 8, 9, 64, 2, 100, 109]
    assert_close(run(model, ids, chunks, capacity=511), wanted, "transformers", f"chunks {chunks}")


def test_single_steps_give_the_same_rows(loaded: Loaded) -> None:
    model, ids, wanted = loaded
    seen = run(model, ids[:100], [1] * 100)
    assert_close(seen, wanted[:100], "transformers", "token by token")


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    logits = torch.zeros(3, 70)
    logits[1, 40:] = 2.0
    logits[2, [3, 69]] = 1.0
    choice = experts.choose(Router(70, 4, normalises=True), logits)
    assert choice.experts.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [0, 1, 3, 69]]
    torch.testing.assert_close(choice.shares[:2], torch.full((2, 4), 0.25))


def test_groups_of_equal_rank_and_their_experts() -> None:
    """Two of four groups: the lower index of equal ones; then experts of no other group."""
    router = Router(8, 3, scores="sigmoid", num_groups=4, num_groups_kept=2)
    logits = torch.tensor([[0.0, 0.0, 9.0, -9.0, 0.0, 0.0, 5.0, 5.0]])
    # Groups rank by 1, 1, 1 and nearly 2: the last one and the first.
    choice = experts.choose(router, logits)
    assert choice.experts.tolist() == [[0, 6, 7]]
    torch.testing.assert_close(choice.shares, logits[:, [0, 6, 7]].sigmoid())


def test_a_correction_changes_the_choice_and_no_share() -> None:
    router = Router(4, 2, scores="sigmoid", is_corrected=True, normalises=True, scale=2.5)
    logits, correction = torch.tensor([[1.0, 0.5, 0.0, -1.0]]), torch.tensor([0.0, -9.0, 0.0, 9.0])
    choice = experts.choose(router, logits, correction)
    assert choice.experts.tolist() == [[0, 3]]
    scores = logits[:, [0, 3]].sigmoid()
    torch.testing.assert_close(choice.shares, 2.5 * scores / scores.sum())


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16], ids=lambda d: d.value)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_a_token_do_not_depend_on_what_others_choose(
    threads: int, dtype: Dtype, tmp_path: Path
) -> None:
    """A token's logits stay, whatever the tokens behind it in a pass of the same length are."""
    fields = {
        **QWEN, "num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 48, "head_dim": 16,
        "num_attention_heads": 4,
    }  # fmt: skip
    oracle = build(Case("bits", "qwen3_moe", fields))
    model = load(save(oracle, Case("bits", "qwen3_moe", fields), tmp_path), dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids = prompt(128, 61)
        wanted = run(model, ids, [128])[:60]
        for seed in range(1, 4):
            others = torch.cat([ids[:60], prompt(68, 61, seed)])
            assert torch.equal(run(model, others, [128])[:60], wanted)
        others = torch.cat([ids[:60], ids[59:60].expand(68)])  # all choose the same
        assert torch.equal(run(model, others, [128])[:60], wanted)
    finally:
        torch.set_num_threads(before)


FAMILIES = [case for case in CASES if case.name in ("plain", "shared")]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda c: c.family)
def test_experts_of_a_layer_in_one_tensor(case: Case, tmp_path: Path) -> None:
    """As transformers has them in memory, which some tools write; the bits are the same."""
    oracle = build(case)
    one_by_one = load(save(oracle, case, tmp_path / "one by one"))
    oracle.config.save_pretrained(tmp_path / "stacked")
    stored = {name: x.contiguous() for name, x in oracle.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stored)
    save_file(stored, tmp_path / "stacked" / "model.safetensors")
    ids = prompt(40, 61)
    assert torch.equal(run(load(tmp_path / "stacked"), ids, [40]), run(one_by_one, ids, [40]))


def test_stacked_experts_in_fp8(tmp_path: Path) -> None:
    """Codes and the scales of their blocks are cut apart alike."""
    case = Case("fp8", "qwen3_moe", {
        **QWEN, "num_experts": 3, "moe_intermediate_size": 32, "hidden_size": 64, "head_dim": 8,
        "num_hidden_layers": 1,
    })  # fmt: skip
    oracle = build(case)
    oracle.config.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    stored = {name: x.contiguous() for name, x in oracle.state_dict().items()}
    for name, values in list(stored.items()):
        if ".experts." in name:
            rows, columns = values.shape[1] // 16, values.shape[2] // 32
            scales = torch.rand(3, rows, columns, generator=generator) + 0.5
            codes = values.to(torch.float8_e4m3fn)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            wide = scales.repeat_interleave(16, 1).repeat_interleave(32, 2)
            oracle.get_parameter(name).data.copy_(codes.float() * wide)
    listed = ["lm_head", "self_attn", "mlp.gate"]
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [16, 32],
        "modules_to_not_convert": [*listed, *(f"{x}_proj" for x in "qkvo")],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    ids = prompt(40, 61)
    seen = run(load(tmp_path), ids, [25, 15])
    assert_close(seen, oracle_logits(oracle, ids), "transformers", "stacked FP8")


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("gate_up_proj", (5, 28, 24), "experts.5.gate_proj.weight"),  # one too few
        ("gate_up_proj", (7, 28, 24), "experts.6.gate_proj.weight"),  # one too many
        ("gate_up_proj", (6, 27, 24), "gate_up_proj"),
        ("down_proj", (6, 14, 24), "down_proj"),  # transposed
        ("down_proj", None, "experts.0.down_proj.weight"),
    ],
)
def test_stacks_that_do_not_fit_are_named(
    name: str, shape: tuple[int, ...] | None, named: str, tmp_path: Path
) -> None:
    oracle = build(CASES[0])
    oracle.config.save_pretrained(tmp_path)
    stored = {key: x.contiguous() for key, x in oracle.state_dict().items()}
    at = f"model.layers.1.mlp.experts.{name}"
    del stored[at]
    if shape is not None:
        stored[at] = torch.ones(shape)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load(tmp_path)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    save(build(CASES[0]), CASES[0], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    missing = "model.layers.2.mlp.experts.3.down_proj.weight"
    del stored[missing]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match=re.escape(missing)):
        load(tmp_path)


def test_a_layer_that_drafts_is_left_out(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == "glm4_moe")
    oracle = build(case)
    wanted = run(load(save(oracle, case, tmp_path)), prompt(9, 61), [9])
    stored = load_file(tmp_path / "model.safetensors")
    extra = {
        name.replace(".layers.2.", ".layers.3."): x.clone()
        for name, x in stored.items()
        if ".layers.2." in name
    }
    save_file(stored | extra, tmp_path / "model.safetensors")
    assert torch.equal(run(load(tmp_path), prompt(9, 61), [9]), wanted)
    further = {name.replace(".layers.3.", ".layers.4."): x for name, x in extra.items()}
    save_file(stored | further, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match=r"layers\.4"):
        load(tmp_path)


def test_routers_stay_in_fp32(tmp_path: Path) -> None:
    """A correction decides by differences that 16 bits do not hold."""
    case = next(case for case in CASES if case.family == "glm4_moe")
    oracle = build(case)
    for name, buffer in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(1000 + torch.arange(8) * 1e-3)
    folder = save(oracle, case, tmp_path)
    model = load(folder, Dtype.BF16)
    block = model._parts_in_order[-1].block
    assert isinstance(block, MixtureBlock)
    assert block._correction is not None
    assert torch.equal(block._correction, 1000 + torch.arange(8) * 1e-3)


def test_a_token_reads_its_own_experts_and_no_others(tmp_path: Path) -> None:
    """NaN would spread from any expert that takes part."""
    model = load(save(build(CASES[0]), CASES[0], tmp_path))
    ids = prompt(9, 61)
    chosen: list[set[int]] = []

    def run_all() -> Tensor:
        cache = model.new_cache(9)
        model.forward(ids[:8], 0, cache, "none")
        logits = model.forward(ids[8:], 8, cache)
        assert logits is not None
        return logits.clone()

    wanted = run_all()
    blocks = [part.block for part in model._parts_in_order if isinstance(part.block, MixtureBlock)]
    for block in blocks:
        calls: set[int] = set()
        for number, expert in enumerate(block._experts):
            block._experts[number] = Noted(expert, number, calls)
        chosen.append(calls)
    cache = model.new_cache(9)
    model.forward(ids[:8], 0, cache, "none")
    for calls in chosen:
        calls.clear()
    model.forward(ids[8:], 8, cache)
    assert [len(calls) for calls in chosen] == [2, 2, 2]
    for block, calls in zip(blocks, chosen, strict=True):
        for noted in block._experts:
            if noted.number not in calls:
                noted.block._down.fill_(torch.nan)
    again = model.forward(ids[8:], 8, cache)
    assert again is not None
    assert torch.equal(again, wanted)


class Noted:
    """An expert that notes that it was asked."""

    def __init__(self, block: MlpBlock, number: int, calls: set[int]) -> None:
        self.block, self.number, self._calls = block, number, calls

    def __call__(self, h: Tensor, step: Step) -> Tensor:
        self._calls.add(self.number)
        return self.block(h, step)


@pytest.mark.parametrize("tokens", [16, 40, 128])
def test_no_bit_depends_on_the_number_of_threads(tokens: int, tmp_path: Path) -> None:
    """As many threads as `Threads` lets multiply."""
    fields = {**QWEN, "num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 48}
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    case = Case("threads", "qwen3_moe", {**fields, **heads})
    model = load(save(build(case), case, tmp_path))
    ids, before, seen = prompt(tokens, 61), torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            threads = Threads(count)
            threads.use(model.least_rows(tokens), count)
            seen.append(run(model, ids, [tokens]))
        assert threads.may_vary is False or all(torch.equal(x, seen[0]) for x in seen)
    finally:
        torch.set_num_threads(before)
    assert model.least_rows(tokens) == min(tokens, 32)


_BOUNDED = """
import sys
from pathlib import Path

import torch

from soloist.engine import Engine, EngineConfig
from soloist.sampling import SamplingParams

torch.set_num_threads(1)


def anonymous_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


before = anonymous_mb()
engine = Engine.load(EngineConfig(sys.argv[1], device="cpu", precision="bf16", context_tokens=64))
for _ in engine.generate("def f(x):", SamplingParams(max_tokens=4)):
    pass
print(anonymous_mb() - before, engine.resolved.memory.weights_bytes / 1e6)
"""


def mixture_folder(folder: Path, dtype: torch.dtype) -> None:
    """A mixture of 100 MB, nearly all of it experts, with a tokenizer."""
    shipped = shipped_folder("etude")
    vocab = json.loads((shipped / "config.json").read_text())["vocab_size"]
    case = Case("large", "qwen3_moe", {
        **QWEN, "vocab_size": vocab, "hidden_size": 64, "head_dim": 16, "num_experts": 512,
        "moe_intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0,
    })  # fmt: skip
    save(build(case).to(dtype), case, folder)
    for file in shipped.iterdir():
        if file.is_file() and not (folder / file.name).exists():
            shutil.copy(file, folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells it")
def test_experts_that_stay_in_files_take_no_memory(tmp_path: Path) -> None:
    """What the process holds is far less than the file; the system may let go of the rest."""
    mixture_folder(tmp_path, torch.bfloat16)
    assert (tmp_path / "model.safetensors").stat().st_size > 100e6
    script = [sys.executable, "-c", _BOUNDED, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    taken_mb, told_mb = map(float, done.stdout.split())
    assert told_mb < 3
    assert taken_mb < 60


def test_experts_fit_where_their_files_do_not(tmp_path: Path) -> None:
    """The estimate counts what is held: experts of another precision, or rounded, are."""
    mixture_folder(tmp_path, torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    config = read_config(tmp_path / "config.json")
    specs = tensors(config)
    chosen = choose(checkpoint, config, specs, Rounding())
    asked = EngineConfig(precision="bf16", context_tokens=64)
    room = HEADROOM_BYTES + 60_000_000

    def resolved(dtype: Dtype, chosen: Chosen) -> Resolved:
        return resolve(
            replace(asked, precision=dtype.value), config,
            lambda dtype: held_tensors(config, left_in_files(chosen, checkpoint, dtype)),
            Dtype.BF16, "cpu", room,
        )  # fmt: skip

    assert resolved(Dtype.BF16, chosen).memory.weights_bytes < 3e6
    with pytest.raises(OutOfMemory, match="weights 204 MB"):
        resolved(Dtype.FP32, chosen)
    rounded = choose(checkpoint, config, specs, Rounding(layers=Codes.INT8))
    with pytest.raises(OutOfMemory):
        resolved(Dtype.BF16, rounded)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_in_files_give_the_same_logits(stacked: bool, tmp_path: Path) -> None:
    case = CASES[1]
    oracle = build(case)
    folder = save(oracle, case, tmp_path)
    if stacked:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file({k: x.contiguous() for k, x in oracle.state_dict().items()},
                  folder / "model.safetensors")  # fmt: skip
    checkpoint, config = open_checkpoint(folder), read_config(folder / "config.json")
    specs = tensors(config)
    chosen = choose(checkpoint, config, specs, Rounding())
    forms = Forms(in_files=left_in_files(chosen, checkpoint, Dtype.FP32))
    assert len(forms.in_files) == 2 * 3 * 6
    weights = load_weights(checkpoint, specs, Dtype.FP32, torch.device("cpu"), forms=forms)
    seen = run(build_reference(config, weights), prompt(40, 97), [25, 14, 1])
    assert_close(seen, oracle_logits(oracle, prompt(40, 97)), "transformers", "in files")


def test_numbers_in_files_are_checked_as_well(tmp_path: Path) -> None:
    save(build(CASES[0]), CASES[0], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    stored[name][1, 2] = torch.inf
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint, config = open_checkpoint(tmp_path), read_config(tmp_path / "config.json")
    specs = tensors(config)
    forms = Forms(in_files=frozenset(spec.name for spec in specs if spec.expert is not None))
    with pytest.raises(NotFinite, match=re.escape(name)):
        load_weights(checkpoint, specs, Dtype.FP32, torch.device("cpu"), forms=forms)
