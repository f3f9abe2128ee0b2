"""What is measured: a model or a shape with random weights.

On the decode kernel, or a shape without a GPU on the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from soloist.bench.decode import python_prompt
from soloist.device import available_memory_bytes, usable_cores
from soloist.engine import Engine, EngineConfig
from soloist.engine.config import GpuCount, Precision, resolve_device
from soloist.engine.engine import device_name, devices
from soloist.engine.executor import Executor
from soloist.engine.gpus import Placement, place
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.memory import Footprint
from soloist.engine.reference import ReferenceModel
from soloist.engine.tail_path import TailPath
from soloist.errors import DeviceError, DeviceMissing, SettingError
from soloist.gguf.names import is_gguf
from soloist.kv.layout import PAGE_POSITIONS
from soloist.kv.memory import kv_bytes_seen
from soloist.megakernel.gpu import LEAST_CAPABILITY
from soloist.megakernel.program import place_of
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.kv_format import KvFormat, KvName, kv_format
from soloist.model.quantization import read_quantization
from soloist.model.quantized import Quantized, label
from soloist.model.reading import read_json
from soloist.model.tensors import TensorSpec
from soloist.prefill.packed_prompts import packs_prompts
from soloist.prefill.page_form import page_form
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.settings import read_settings
from soloist.weights.choice import Rounding, require_matrices, rounding_of, untied
from soloist.weights.distribution import distribute
from soloist.weights.loading import regrouped
from soloist.weights.memory import parts_bytes, row_bytes, stored_bytes, streamed_bytes
from soloist.weights.numbers import as_numbers
from soloist.weights.random import random_tensors, random_weights

NOT_ROUNDED = Rounding()


class Reading(NamedTuple):
    """What is tried of reading prompts.

    Attributes:
        packed_prompts: as of `EngineConfig`.
        unpacks_prompts: the same.
        page_attention: the same.
        tail_path: the same.
        host_bytes: of the host's memory, at most, for cached prompts whose pages others need.
        eight_bit_prompts: as of `EngineConfig`.
    """

    packed_prompts: bool | None = None
    unpacks_prompts: bool = False
    page_attention: bool | None = None
    tail_path: TailPath = "auto"
    host_bytes: int = 0
    eight_bit_prompts: bool = False


AS_EVER = Reading()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on the decode kernel, and a prompt.

    Attributes:
        name: of the model, for people.
        model: ready for launches; its pool holds nothing yet, or random keys and values.
        prompt_ids: what to run before measuring; at least one token.
        start: position at which measuring starts.
        weights: how matrices are stored, as result files call it.
    """

    name: str
    model: KernelModel
    prompt_ids: list[int]
    start: int
    weights: str

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self.model.device

    @property
    def device_name(self) -> str:
        """For people."""
        return device_name(str(self.device))

    def streamed_bytes(self, position: int) -> int:
        """Weights, keys and values that one GPU has to read for the token at `position`."""
        plan = self.model.plan
        weights = streamed_bytes(tensors(plan.model), plan.dtype, plan.formats, plan.model)
        seen = kv_bytes_seen(plan.model, plan.kv_layout.format, position)
        return (weights + seen) // plan.ranks

    def phase_bytes(self, position: int) -> dict[str, int]:
        """The same by phases of a round; norms and biases are in none of them."""
        config, dtype = self.model.plan.model, self.model.plan.dtype
        phases = {
            "qkv": "qkv", "attention_output": "output", "gate_up": "gate_up", "down": "down",
            "embedding" if config.tied_head else "head": "head",
        }  # fmt: skip
        if any(mixture.shared for mixture in config.mixtures):
            phases |= {"shared.gate_up": "router", "shared.down": "down"}
        sums = dict.fromkeys(phases.values(), 0)
        for spec in tensors(config):
            is_layer = spec.name.startswith("layers.")
            phase = phases.get(place_of(spec.name)[1] if is_layer else spec.name)
            if phase is not None:
                sums[phase] += stored_bytes([spec], dtype, self.model.plan.formats)
        kv = self.model.plan.kv_layout.format
        sums["attention"] = kv_bytes_seen(config, kv, position)
        return {phase: total // self.model.plan.ranks for phase, total in sums.items()}


def require_gpu(asked: str, otherwise: str) -> torch.device:
    """The GPU to use.

    Args:
        asked: 'auto', 'cuda' or 'cuda:N'.
        otherwise: what can be done where there is none.

    Raises:
        SettingError: the CPU was asked for.
        DeviceMissing: there is no GPU, or not this one.
    """
    if asked == "cpu":
        allowed = "auto, cuda, cuda:N: this runs on a GPU only"
        raise SettingError("--device", asked, allowed, otherwise)
    present = devices()
    if not any(name.startswith("cuda") for name in present):
        least = ".".join(map(str, LEAST_CAPABILITY))
        hint = f"this needs an NVIDIA GPU of compute capability {least} or later; {otherwise}"
        raise DeviceMissing("cuda" if asked == "auto" else asked, present, hint)
    return torch.device(resolve_device(asked, present))


def shape_placement(
    file: Path, precision: Precision, device: torch.device, asked: str, gpus: GpuCount
) -> Placement:
    """The GPUs that a shape runs on.

    Args:
        file: its config.json.
        precision: as of `shape_dtype`.
        device: the GPU to begin with.
        asked: as the user named it.
        gpus: how many.

    Raises:
        UserError, DeviceError: it cannot run there; the message says why.
    """
    config, dtype = read_config(file), shape_dtype(precision, device)
    return place(EngineConfig(device=asked, gpus=gpus), device, config, dtype)


def shape_name(file: Path) -> str:
    """A configuration's name for people."""
    return file.parent.name if file.stem == "config" else file.stem


def shape_dtype(precision: Precision, device: torch.device | None = None) -> Dtype:
    """What a shape runs in: on the CPU as any model, elsewhere and in files in 16 bits.

    Raises:
        SettingError: the kernel has no such precision.
    """
    if device is not None and device.type == "cpu":
        return Dtype.FP32 if precision == "auto" else Dtype(precision)
    if precision == "fp32":
        raise SettingError("--precision", precision, "auto, bf16, fp16 with --shape")
    return Dtype.BF16 if precision == "auto" else Dtype(precision)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model that has random weights.

    Attributes:
        config: what it computes.
        specs: its tensors.
        dtype: of those that are not quantised.
        stored: matrices that are random codes, by name.
        kv: how keys and values are stored.
    """

    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    dtype: Dtype
    stored: Mapping[str, Quantized]
    kv: KvFormat

    @property
    def kv_label(self) -> str:
        """How keys and values are stored, as result files call it."""
        return "" if self.kv.is_plain else self.kv.name

    def label(self, model: Executor) -> str:
        """How weights are stored there, as result files call it."""
        kept = dict(self.stored)
        if isinstance(model, KernelModel):
            kept = {name: kept[name] for name in model.plan.formats}
        layers = [kept.get(spec.name) for spec in self.specs if spec.is_layer_matrix]
        return label(layers, kept.get("head"), self.dtype.value)

    def streamed_bytes(self, model: Executor) -> int:
        """Weights that it reads for one token of one sequence."""
        formats = model.plan.formats if isinstance(model, KernelModel) else {}
        return streamed_bytes(self.specs, self.dtype, formats, self.config)


def read_shape(
    file: Path, dtype: Dtype, rounding: Rounding = NOT_ROUNDED, kv: KvName | None = None
) -> Shape:
    """The shape of a config.json: quantised as that says, and as `rounded_shape` has the rest.

    Raises:
        ConfigError: the file cannot be used.
        SettingError: its matrices cannot be rounded, or are codes already; or heads have no such
            format.
        CheckpointError: a row has no groups of the right size.
    """
    config = read_config(file)
    shape = rounded_shape(config, dtype, rounding, kv)
    method = None if is_gguf(file) else read_quantization(file.parent, read_json(file), file.name)
    if method is None:
        return shape
    from soloist.model.quantization.expected import expected_matrices

    told = expected_matrices(method, tensors(config), dtype, file)
    for option, codes, is_told in (
        ("--weights", rounding.layers, True), ("--head-weights", rounding.head, "head" in told),
    ):  # fmt: skip
        if codes is not None and is_told:
            allowed = f"none for {shape_name(file)}, whose configuration says how it is quantised"
            raise SettingError(option, codes.value, allowed, f"leave {option} out")
    return replace(shape, stored={**told, **shape.stored})


def rounded_shape(
    config: ModelConfig,
    dtype: Dtype,
    rounding: Rounding = NOT_ROUNDED,
    kv: KvName | None = None,
) -> Shape:
    """A shape whose matrices are codes, as if they had been rounded, with such a KV cache.

    Raises:
        SettingError: its matrices cannot be rounded, or heads have no such format.
        CheckpointError: a row has no groups of the right size.
    """
    specs = tensors(config)
    require_matrices(config.family, specs, rounding)
    if rounding.head is not None:
        config, specs = untied(config, specs)
    # Scales are in 16 bits whatever the reference computes in.
    in_16_bits = Dtype.BF16 if dtype is Dtype.FP32 else dtype
    stored = rounding_of(specs, rounding, in_16_bits)
    return Shape(config, specs, dtype, stored, kv_format(kv, config, dtype))


def shape_on_gpu(
    shape: Shape,
    context_tokens: int,
    placed: Placement,
    sequences: int = 1,
    *,
    chunk_tokens: int = MOST_PASS_TOKENS,
    keeps_prefixes: bool = False,
    reading: Reading = AS_EVER,
) -> KernelModel:
    """Random weights on the decode kernel; rows stay beside the packed weights if both fit.

    `reading` says how prompts are read.

    Raises:
        DeviceError: the kernel does not run this shape, or it does not fit.
        ShapeUnsupported: nor does a way of reading that was asked for.
        KvUnsupported: it does, but not with such keys and values.
    """
    config, specs, dtype = shape.config, shape.specs, shape.dtype
    support = placed.support(config, dtype, shape.stored, shape.kv)
    if support.plan is None:
        raise DeviceError(support.refusal.partition(";")[0], "measure it without --shape")
    held, formats = placed.share_of(config), support.plan.formats
    pooled_tokens = -(-context_tokens // PAGE_POSITIONS) * PAGE_POSITIONS * sequences
    free_bytes = placed.free_bytes()
    pages = page_form(support.plan, asked=reading.page_attention, shares_gpu=placed.sharing > 1)
    unpacks = reading.unpacks_prompts
    packs = packs_prompts(support.plan, asked=reading.packed_prompts, unpacks=unpacks)
    footprint = Footprint(
        held, tensors(held), dtype, support.plan, packs, pages is not None, shape.kv
    )
    needed_bytes = footprint.require(pooled_tokens, free_bytes).needed_bytes
    # On the first GPU tensors are drawn before they are cut: as much room as all take is more than
    # that. Experts are drawn while they are packed.
    rest = [spec for spec in specs if spec.expert is None]
    in_parts = parts_bytes(rest, dtype, formats)
    is_staged = needed_bytes + in_parts > free_bytes
    has_room = needed_bytes + max(in_parts, row_bytes(rest, dtype)) <= free_bytes
    home = torch.device("cpu") if is_staged else placed.devices[0]
    kept = {name: shape.stored[name] for name in formats}
    # Drawn on the GPU in any case: the numbers are not to depend on the room.
    drawn = random_tensors(specs, dtype, placed.devices[0], home=home, stored=kept)
    weights = distribute(
        regrouped(drawn, specs, kept, formats),
        config, placed.devices, stays_on_host=is_staged, plan=support.plan,
    )  # fmt: skip
    capacity = Capacity(
        context_tokens, sequences, chunk_tokens=chunk_tokens, keeps_prefixes=keeps_prefixes,
        host_bytes=reading.host_bytes, page_attention=pages is not None,
        tail_path=reading.tail_path, eight_bit_prompts=reading.eight_bit_prompts,
    )  # fmt: skip
    model = load_kernel(
        support.plan, weights, placed.devices, capacity, read_settings().cache,
        keep_rows=has_room and not (packs or unpacks), packed_prompts=packs,
    )  # fmt: skip
    model.prepare()
    return model


def shape_on_cpu(
    shape: Shape, context_tokens: int, *, keeps_prefixes: bool = False
) -> ReferenceModel:
    """Random weights on the reference, which computes with the numbers that codes stand for.

    Raises:
        OutOfMemory: they do not fit.
    """
    config, specs, dtype = shape.config, shape.specs, shape.dtype
    footprint = Footprint(config, specs, dtype, kv=shape.kv)
    footprint.require(context_tokens, available_memory_bytes())
    torch.set_num_threads(read_settings().threads or usable_cores())
    weights = random_weights(specs, dtype, torch.device("cpu"), stored=shape.stored)
    for name, quantized in shape.stored.items():
        parts = {part: weights.pop(name + part) for part in quantized.parts}
        weights[name] = as_numbers(quantized, parts, dtype)
    return ReferenceModel(
        config, weights, context_tokens, keeps_prefixes=keeps_prefixes, kv=shape.kv
    )


def shape_subject(
    file: Path, precision: Precision, placed: Placement, prompt_tokens: int, rounds: int,
    context: int | None, rounding: Rounding = NOT_ROUNDED,
) -> Subject:  # fmt: skip
    """A shape, a random prompt and, with `context`, a random KV cache up to there.

    Raises:
        UserError, DeviceError: it cannot be measured; the message says why.
    """
    config, dtype = read_config(file), shape_dtype(precision)
    start = prompt_tokens if context is None else context
    tokens = max(prompt_tokens, start) + rounds
    if tokens > config.context_tokens:
        raise SettingError(
            "--context", start, f"with the tokens after it at most {config.context_tokens:,}"
        )
    shape = read_shape(file, dtype, rounding)
    model = shape_on_gpu(shape, tokens, placed)
    if context is not None:
        model.fill_pools()
    prompt = random_prompt(config, prompt_tokens)
    return Subject(shape_name(file), model, prompt, start, shape.label(model))


def model_subject(
    asked: EngineConfig, prompt: str | None, prompt_tokens: int, rounds: int
) -> Subject:
    """A model as any request finds it; without a prompt, `prompt_tokens` of Python text.

    Raises:
        UserError, DeviceError: it cannot be measured; the message says why.
    """
    engine = Engine.load(asked)
    if not isinstance(engine.model, KernelModel):
        raise DeviceError(
            engine.report.refusal.partition(";")[0], "this measures the decode kernel only"
        )
    ids = (
        python_prompt(engine, prompt_tokens) if prompt is None else engine.tokenizer.encode(prompt)
    )
    engine.processor.check_prompt(ids, rounds)
    report = engine.report
    return Subject(report.folder.name, engine.model, ids, len(ids), report.weights)


def random_prompt(config: ModelConfig, num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (num_tokens,), generator=generator)
    return [int(i) for i in ids]
