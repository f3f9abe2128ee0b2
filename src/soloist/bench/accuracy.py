"""`bench accuracy`: 16-bit logits of a given text against fp32 arithmetic on the same weights.

Both read the weights that 16 bits hold, or that codes stand for, so what differs is arithmetic
alone. Against weights before they were rounded, what rounding costs is part of it. One model is in
memory at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from soloist.bench import record, rows
from soloist.bench.agreement import agreement, forced_logits, prompt_logits, require_same_bits
from soloist.bench.caches import free
from soloist.bench.decode import python_prompt
from soloist.bench.folder import numbers_model, random_model
from soloist.bench.sizes import require_at_least
from soloist.bench.subject import NOT_ROUNDED, random_prompt
from soloist.bench.text import text_of
from soloist.engine import Engine, EngineConfig
from soloist.engine.config import (
    GpuCount,
    Precision,
    require_packed_eight_bits,
    resolve_device,
)
from soloist.engine.engine import device_name, devices
from soloist.engine.kernel import KernelModel
from soloist.engine.reference import ReferenceModel
from soloist.errors import BadTokenId, BitsDiffer, SettingError
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.ranks import Launcher
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import config_file, find_model
from soloist.model.kv_format import KvName
from soloist.model.torch_types import Weights
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.reference.build import build_reference
from soloist.reference.device import Reference
from soloist.reference.memory import REFERENCE_CHUNK_TOKENS
from soloist.settings import read_settings
from soloist.weights.choice import Chosen, Rounding, choose
from soloist.weights.reading import Forms, load_weights

_REPEATED_TOKENS = 64
# Positions told apart from those behind them.
_FIRST_STRETCH = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        model: a folder, a hub id or a shipped model; unused with a shape.
        shape: a config.json, for random weights and tokens instead.
        text: a file to read; None for Python's own text.
        positions: T, teacher-forced.
        against: 'transformers', 'unquantised' or None.
        repeats: equal launches whose bits are compared; 0 for none.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        precision: 'bf16', 'fp16', or 'auto' for the checkpoint's own, bf16 where that is fp32.
        gpus: how many run the model together, or 'auto'.
        rounding: what matrices are rounded to first; both sides read the rounded ones, but for
            'unquantised'.
        accepted_fields: of the model's config.json, that nobody knows.
        kv: what Soloist stores keys and values as; with it, precision may be 'fp32'.
        prompts: also measure passes that read prompts.
        packed_prompts, eight_bit_prompts: as of `EngineConfig`, with `prompts` only.
    """

    model: str
    shape: Path | None
    text: Path | None
    positions: int
    against: str | None
    repeats: int
    device: str
    precision: Precision
    gpus: GpuCount = 1
    rounding: Rounding = NOT_ROUNDED
    accepted_fields: tuple[str, ...] = ()
    kv: KvName | None = None
    prompts: bool = False
    packed_prompts: bool | None = None
    eight_bit_prompts: bool = False


@dataclass(frozen=True, slots=True)
class _Files:
    """A model's files, opened."""

    name: str
    folder: Path
    chosen: Chosen
    checkpoint: Checkpoint
    dtype: Dtype
    accepted_fields: tuple[str, ...]

    @property
    def config(self) -> ModelConfig:
        """What it computes."""
        return self.chosen.config

    @property
    def plain(self) -> Chosen:
        """The same with nothing rounded."""
        config = read_config(config_file(self.folder), self.accepted_fields)
        return choose(self.checkpoint, config, tensors(config), NOT_ROUNDED)


@dataclass(frozen=True, slots=True)
class _Read:
    """What one engine made of the text: logits [T, V], in how many ways, and how often again."""

    engine: str
    logits: Tensor
    weights: str
    same_bits: tuple[str, ...] = ()
    repeats: int = 0


def measure(plan: Plan) -> list[rows.AccuracyRow]:
    """A row for Soloist's executor and, if asked for, others: prompts, the rival, other weights.

    Raises:
        SettingError: sizes that cannot be measured, or an unknown rival.
        UserError, DeviceError: as from loading the model.
        BadTokenId: the tokenizer has ids that the model's vocabulary does not have.
        BitsDiffer: columns, launches or repeats changed a bit.
    """
    _check(plan)
    device = torch.device(resolve_device(plan.device, devices()))
    if device.type != "cuda":
        _require_none_of_the_kernel(plan)
    with _files(plan, device) as files:
        if plan.positions > files.config.context_tokens:
            raise SettingError(
                "--positions", plan.positions, f"at most {files.config.context_tokens:,}"
            )
        ids, ours = _ours(plan, files, device)
        read = [*ours]
        free(device)
        if plan.against == "transformers":
            logits = _transformers_logits(files, device, ids[:-1])
            read.append(_Read("transformers forward", logits, ours[0].weights))
            free(device)
        right = _reference_logits(_fp32_reference(files.chosen, files, device), ids[:-1])
        targets = torch.tensor(ids[1:])
        made = [_row(plan, files, device, one, right, targets) for one in read]
        if plan.against == "unquantised":
            free(device)
            right = _reference_logits(_fp32_reference(files.plain, files, device), ids[:-1])
            others = [_row(plan, files, device, one, right, targets) for one in ours]
            made += [replace(row, fp32_weights="unquantised") for row in others]
    return made


def _check(plan: Plan) -> None:
    require_at_least(("--positions", plan.positions, 2), ("--repeats", plan.repeats, 0))
    if plan.precision == "fp32" and plan.kv is None:
        raise SettingError(
            "--precision", plan.precision,
            "auto, bf16, fp16, each compared with fp32; fp32 with --kv only",
        )  # fmt: skip
    if plan.against not in (None, "transformers", "unquantised"):
        raise SettingError("--against", plan.against, "transformers, unquantised")
    if plan.against == "unquantised" and plan.rounding == NOT_ROUNDED:
        raise SettingError(
            "--against", plan.against, "only with --weights or --head-weights",
            "name what the weights are rounded to, such as --weights int4",
        )  # fmt: skip
    if plan.shape is not None and plan.text is not None:
        raise SettingError(
            "--text", str(plan.text), "only without --shape, which uses random tokens"
        )
    _check_prompts(plan)


def _check_prompts(plan: Plan) -> None:
    packed, eight_bits = plan.packed_prompts, plan.eight_bit_prompts
    require_packed_eight_bits(EngineConfig(packed_prompts=packed, eight_bit_prompts=eight_bits))
    if not plan.prompts:
        packing = "--no-packed-prompts" if packed is False else "--packed-prompts"
        for option, is_asked in (
            ("--eight-bit-prompts", eight_bits), (packing, packed is not None),
        ):  # fmt: skip
            if is_asked:
                raise SettingError(
                    option, "on", "only with --prompts, which measures how prompts are read",
                    "add --prompts",
                )  # fmt: skip
    elif plan.positions > MOST_PASS_TOKENS:
        raise SettingError(
            "--positions", plan.positions,
            f"at most {MOST_PASS_TOKENS:,} with --prompts: one pass reads them all",
        )  # fmt: skip


def _require_none_of_the_kernel(plan: Plan) -> None:
    """Refuse options that the reference does not have."""
    given = {"--repeats": plan.repeats, "--prompts": "on" if plan.prompts else ""}
    for option, value in given.items():
        if value:
            raise SettingError(
                option,
                value,
                "on the decode kernel only",
                f"leave out {option} where the reference runs",
            )


@contextmanager
def _files(plan: Plan, device: torch.device) -> Iterator[_Files]:
    if plan.shape is None:
        offline = read_settings().hub_offline
        yield _opened(plan, find_model(plan.model, offline=offline))
        return
    with random_model(plan.shape, plan.precision, device) as folder:
        yield _opened(plan, folder)


def _opened(plan: Plan, folder: Path) -> _Files:
    checkpoint = open_checkpoint(folder)
    stored = Dtype.BF16 if checkpoint.dtype is Dtype.FP32 else checkpoint.dtype
    dtype = stored if plan.precision == "auto" else Dtype(plan.precision)
    config = read_config(config_file(folder), plan.accepted_fields)
    chosen = choose(checkpoint, config, tensors(config), plan.rounding)
    return _Files(folder.name, folder, chosen, checkpoint, dtype, plan.accepted_fields)


def _ours(plan: Plan, files: _Files, device: torch.device) -> tuple[list[int], list[_Read]]:
    """The text, T + 1 tokens, and what the executor that requests use makes of it.

    The first is what decoding makes of it, the next, if asked for, what prompts do.
    """
    room = max(plan.positions, 2 * _REPEATED_TOKENS)
    engine = Engine.load(
        EngineConfig(
            str(files.folder),
            plan.device,
            files.dtype.value,
            context_tokens=min(room, files.config.context_tokens),
            gpus=plan.gpus,
            weights=plan.rounding.layers,
            head_weights=plan.rounding.head,
            accepted_fields=plan.accepted_fields,
            kv=plan.kv,
            packed_prompts=plan.packed_prompts,
            eight_bit_prompts=plan.eight_bit_prompts,
        )
    )
    weights = engine.report.weights
    ids = _token_ids(plan, engine)
    if isinstance(engine.model, KernelModel):
        decoder, vocab = engine.model.decoder, engine.config.vocab_size
        logits, same_bits = _kernel_logits(decoder, vocab, ids[:-1])
        _require_repeats(plan.repeats, decoder, ids)
        gpus = engine.resolved.num_gpus
        where = f" on {gpus} GPUs" if gpus > 1 else ""
        name = f"soloist, decode kernel{where}"
        ours = [_Read(name, logits.to(device), weights, same_bits, plan.repeats)]
        if plan.prompts:
            name = f"soloist, prompts{' in 8 bits' if plan.eight_bit_prompts else ''}{where}"
            logits = prompt_logits(engine.model.prefill, ids[:-1], engine.model.page_tables[0])
            ours.append(_Read(name, logits.to(device), weights))
        return ids, ours
    _require_none_of_the_kernel(plan)
    assert isinstance(engine.model, ReferenceModel), "the only other executor"
    logits = _reference_logits(engine.model.reference, ids[:-1])
    return ids, [_Read("soloist, reference", logits, weights)]


def _token_ids(plan: Plan, engine: Engine) -> list[int]:
    count = plan.positions + 1
    if plan.shape is not None:
        return random_prompt(engine.config, count)
    ids = _text_ids(plan, engine, count)
    vocab_size = engine.config.vocab_size
    if (outside := max(ids)) >= vocab_size:
        raise BadTokenId("text", outside, vocab_size)
    return ids


def _text_ids(plan: Plan, engine: Engine, count: int) -> list[int]:
    if plan.text is None:
        return python_prompt(engine, count)
    ids = engine.tokenizer.encode(text_of(plan.text))
    if len(ids) < count:
        raise SettingError(
            "--text", str(plan.text), f"a text of at least {count:,} tokens; it has {len(ids):,}"
        )
    return ids[:count]


def _kernel_logits(
    decoder: Launcher, vocab_size: int, ids: list[int]
) -> tuple[Tensor, tuple[str, ...]]:
    """One column in one launch, and the names of other ways that gave the same bits."""
    all_of_them = len(ids)
    first = forced_logits(decoder, vocab_size, ids, 1, all_of_them)
    ways = {
        f"{MAX_QUERIES} columns": (MAX_QUERIES, all_of_them),
        "64 rounds a launch": (1, 64),
        "1 round a launch": (1, 1),
        f"{MAX_QUERIES} columns, 1 round a launch": (MAX_QUERIES, 1),
    }
    for name, (columns, rounds) in ways.items():
        other = forced_logits(decoder, vocab_size, ids, columns, rounds)
        require_same_bits(f"1 column in one launch and of {name}", first, other)
    return first, ("1 column in one launch", *ways)


def _require_repeats(repeats: int, decoder: Launcher, ids: list[int]) -> None:
    if not repeats:
        return
    column = [Query(0, 0, ids[:3])]
    tokens = decoder.run(column, _REPEATED_TOKENS)
    logits = decoder.logits[0].clone()
    for i in range(1, repeats):
        if decoder.run(column, _REPEATED_TOKENS) != tokens:
            raise BitsDiffer("the tokens of equal launches", f"launch {i}")
        if not torch.equal(decoder.logits[0], logits):
            raise BitsDiffer("the last logits of equal launches", f"launch {i}")


def _transformers_logits(files: _Files, device: torch.device, ids: list[int]) -> Tensor:
    """[T, V] of one forward pass in 16 bits; of codes it reads the numbers they stand for."""
    from soloist.bench.rival import forward_logits

    if not files.chosen.stored:
        return forward_logits(files.folder, files.dtype, device, ids)
    copied = numbers_model(files.folder, files.checkpoint, files.chosen, files.dtype, device)
    with copied as folder:
        return forward_logits(folder, files.dtype, device, ids)


def _fp32_reference(chosen: Chosen, files: _Files, device: torch.device) -> Reference:
    """Weights rounded to 16 bits, or what codes stand for; arithmetic in fp32."""
    weights: Weights = {}
    for is_exact in (False, True):
        dtype = Dtype.FP32 if is_exact else files.dtype
        specs = [spec for spec in chosen.specs if (spec.name in chosen.stored) is is_exact]
        forms = Forms(rounding=chosen.rounding)
        weights |= load_weights(files.checkpoint, specs, dtype, device, forms=forms)
    for name in weights:
        weights[name] = weights[name].float()
    return build_reference(chosen.config, weights)


def _reference_logits(reference: Reference, ids: list[int]) -> Tensor:
    """[T, V] in fp32."""
    cache = reference.new_cache(len(ids))
    chunks = []
    for start in range(0, len(ids), REFERENCE_CHUNK_TOKENS):
        chunk = torch.tensor(ids[start : start + REFERENCE_CHUNK_TOKENS], device=reference.device)
        logits = reference.forward(chunk, start, cache, "all")
        assert logits is not None, "logits were asked for"
        chunks.append(logits.clone())
    return torch.cat(chunks)


def _stretches(right: Tensor, logits: Tensor, targets: Tensor) -> tuple[rows.Stretch, ...]:
    """Agreement by position, each stretch as long as all before it."""
    first, made = 0, []
    while first < len(targets):
        stop = min(max(_FIRST_STRETCH, 2 * first), len(targets))
        part = slice(first, stop)
        a = agreement(right[part], logits[part], targets[part])
        made.append(
            rows.Stretch(first, stop, a.mean_kl, a.nll, a.nll_difference, a.nll_standard_error)
        )
        first = stop
    return tuple(made)


def _row(
    plan: Plan, files: _Files, device: torch.device, read: _Read, right: Tensor, targets: Tensor
) -> rows.AccuracyRow:
    a = agreement(right, read.logits, targets)
    is_ours = read.engine.startswith("soloist")
    packages = ["torch"] if is_ours else ["torch", "transformers"]
    text = "Python's argparse" if plan.text is None else plan.text.name
    return rows.AccuracyRow(
        bench="accuracy",
        engine=read.engine,
        shape=files.name,
        device=device_name(str(device)),
        precision=files.dtype.value,
        positions=plan.positions,
        text="random tokens" if plan.shape is not None else text,
        mean_kl=a.mean_kl,
        max_kl=a.max_kl,
        nll=a.nll,
        nll_difference=a.nll_difference,
        nll_standard_error=a.nll_standard_error,
        top_1_agreement=a.top_1,
        same_bits=read.same_bits,
        repeats=read.repeats,
        weights=read.weights,
        kv=plan.kv or "" if is_ours else "",
        by_position=_stretches(right, read.logits, targets),
        **record.origin(*packages),
    )
