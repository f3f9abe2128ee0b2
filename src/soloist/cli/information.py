"""`soloist info`: what a model is and what it needs, without loading it."""

from contextlib import suppress
from dataclasses import asdict, dataclass

from soloist.cli.tables import show_facts
from soloist.cli.terminal import millions, print_json
from soloist.device import available_memory_bytes
from soloist.errors import SettingError, ShapeUnsupported, gigabytes
from soloist.kv.memory import kv_bytes_per_token
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.plan import make_plan
from soloist.model.adapter import open_adapter
from soloist.model.checkpoint import Checkpoint, open_checkpoint
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.folder import config_file, find_adapter, find_model, name_of
from soloist.model.kv_format import KvFormat, KvName, kv_format
from soloist.model.quantization.matrices import describe
from soloist.model.rope import LongScaling
from soloist.model.tensors import TensorSpec, of_a_token, parameters
from soloist.reference.memory import scratch_bytes
from soloist.settings import read_settings
from soloist.text.files import read_eos_ids
from soloist.weights.choice import Chosen, Rounding, choose, held_tensors, left_in_files
from soloist.weights.formats import formats_of
from soloist.weights.memory import row_bytes, streamed_bytes


@dataclass(frozen=True, slots=True)
class PrecisionFacts:
    """What one precision costs."""

    weights_bytes: int
    streamed_bytes_per_token: int
    kv_bytes_per_token: int
    memory_bytes: int
    fits: bool
    experts_in_files: bool


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter in numbers."""

    name: str
    ranks: tuple[int, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model in numbers."""

    model: str
    family: str
    parameters: int
    active_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    attention: str
    experts: str | None
    context_tokens: int
    stored_as: str
    quantised_as: str | None
    kernel_bytes_per_token: int | None
    checkpoint_bytes: int
    available_memory_bytes: int
    accepted_fields: tuple[str, ...]
    adapter: AdapterFacts | None
    kv: str | None
    by_precision: dict[str, PrecisionFacts]


def show(
    model: str,
    context: int | None,
    revision: str | None,
    accepted: tuple[str, ...] = (),
    adapter: str | None = None,
    kv: KvName | None = None,
    *,
    as_json: bool,
) -> None:
    """Print the facts of a model, and of an adapter for it.

    Raises:
        UserError: the model, its files or the context cannot be used.
    """
    facts = gather(model, context, revision, accepted, adapter, kv)
    if as_json:
        print_json(asdict(facts))
    else:
        show_facts(facts.model, _rows(facts))


def gather(
    model: str,
    context: int | None,
    revision: str | None,
    accepted: tuple[str, ...] = (),
    adapter: str | None = None,
    kv: KvName | None = None,
) -> ModelFacts:
    """Read configuration and headers; no weights."""
    folder = find_model(model, revision=revision, offline=read_settings().hub_offline)
    config = read_config(config_file(folder), accepted)
    read_eos_ids(folder, config.vocab_size)
    specs = tensors(config)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(specs, FAMILIES[config.family].ignored(config))
    found = None if adapter is None else _adapter_facts(adapter, checkpoint, specs)
    tokens = context or config.context_tokens
    if not 1 <= tokens <= config.context_tokens:
        raise SettingError("--context", tokens, f"1 … {config.context_tokens:,}")
    available = available_memory_bytes()
    chosen = choose(checkpoint, config, specs, Rounding())
    in_files = {
        dtype: left_in_files(chosen, checkpoint, dtype) if adapter is None else frozenset[str]()
        for dtype in Dtype
    }
    return ModelFacts(
        model=folder.name,
        family=config.family,
        parameters=parameters(specs),
        active_parameters=parameters(of_a_token(specs, config.num_chosen)),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        attention=describe_attention(config.for_context(tokens)),
        experts=describe_experts(config),
        context_tokens=tokens,
        stored_as=checkpoint.dtype.value,
        quantised_as=None
        if checkpoint.quantization is None
        else describe(checkpoint.quantization, specs),
        kernel_bytes_per_token=_kernel_bytes(checkpoint, config, chosen),
        checkpoint_bytes=checkpoint.num_bytes,
        available_memory_bytes=available,
        accepted_fields=accepted,
        adapter=found,
        kv=kv,
        by_precision={
            dtype.value: _precision_facts(
                config,
                specs,
                dtype,
                tokens,
                available,
                in_files[dtype],
                kv_format(kv, config, dtype),
            )
            for dtype in Dtype
        },
    )


def _adapter_facts(
    given: str, checkpoint: Checkpoint, specs: tuple[TensorSpec, ...]
) -> AdapterFacts:
    folder = find_adapter(given, offline=read_settings().hub_offline)
    adapter = open_adapter(folder, checkpoint, specs)
    return AdapterFacts(name_of(given), adapter.ranks, len(adapter.changes), adapter.num_bytes)


def _kernel_bytes(checkpoint: Checkpoint, config: ModelConfig, chosen: Chosen) -> int | None:
    """Weights that the decode kernel reads for a token, if it runs and some are quantised."""
    if not (formats := formats_of(chosen.stored, config)):
        return None
    with suppress(ShapeUnsupported):
        make_plan(config, checkpoint.dtype, TYPICAL["sm_90a"], formats=formats)
        return streamed_bytes(chosen.specs, checkpoint.dtype, formats, config)
    return None


def describe_attention(config: ModelConfig) -> str:
    """Heads, and how many layers slide or go without rope."""
    first = config.layers[0].attention
    parts = [
        f"{first.num_query_heads} query / {first.num_kv_heads} KV heads of {first.head_dim}",
    ]
    windows = [x.attention.window for x in config.layers if x.attention.window is not None]
    if windows:
        parts.append(f"window {windows[0]:,} on {len(windows)} of {config.num_layers} layers")
    bare = sum(not x.attention.rope for x in config.layers)
    dims = config.rope.rotated_dims(first.head_dim)
    if dims < first.head_dim:
        parts.append(f"rope on {dims} values of a head")
    if isinstance(config.rope.scaling, LongScaling):
        parts.append(f"{'long' if config.rope.scaling.is_long else 'short'} rope factors")
    if bare:
        parts.append(f"no rope on {bare} layers")
    if config.lanes is not None:
        parts.append(f"{config.lanes.num_lanes} lanes, delay {config.lanes.delay_layers}")
    return ", ".join(parts)


def describe_experts(config: ModelConfig) -> str | None:
    """How many a token takes of how many; None for a model without."""
    if not (mixtures := config.mixtures):
        return None
    first = mixtures[0]
    router = first.router
    parts = [f"{router.num_chosen} of {router.num_experts} for a token"]
    if router.num_groups > 1:
        parts.append(f"out of {router.num_groups_kept} of {router.num_groups} groups")
    if first.shared is not None:
        parts.append("beside a shared one")
    if dense := config.num_layers - len(mixtures):
        parts.append(f"none in {dense} of {config.num_layers} layers")
    return ", ".join(parts)


def _precision_facts(
    config: ModelConfig,
    specs: tuple[TensorSpec, ...],
    dtype: Dtype,
    context_tokens: int,
    available: int,
    in_files: frozenset[str],
    kv: KvFormat,
) -> PrecisionFacts:
    """Experts that stay in files take no memory of their own on a CPU."""
    held = held_tensors(config, in_files)
    weights_bytes, token_bytes = row_bytes(specs, dtype), kv_bytes_per_token(config, kv)
    scratch = scratch_bytes(config, dtype, context_tokens, kv=kv)
    memory_bytes = row_bytes(held, dtype) + token_bytes * context_tokens + scratch
    return PrecisionFacts(
        weights_bytes=weights_bytes,
        streamed_bytes_per_token=streamed_bytes(specs, dtype, {}, config),
        kv_bytes_per_token=token_bytes,
        memory_bytes=memory_bytes,
        fits=memory_bytes <= available,
        experts_in_files=bool(in_files),
    )


def _rows(f: ModelFacts) -> list[tuple[str, str]]:
    rows = [
        ("family", f.family),
        ("parameters", f"{f.parameters:,} ({millions(f.parameters)})"),
        ("layers", f"{f.num_layers} × hidden {f.hidden_size:,}"),
        ("attention", f.attention),
        ("vocabulary", f"{f.vocab_size:,}"),
        ("context", f"{f.context_tokens:,} tokens"),
        ("checkpoint", f"{gigabytes(f.checkpoint_bytes)} stored as {f.stored_as}"),
    ]
    if f.experts is not None:
        rows[1] = ("parameters", f"{rows[1][1]}, {millions(f.active_parameters)} for a token")
        rows.insert(4, ("experts", f.experts))
    if f.accepted_fields:
        rows.insert(1, ("accepted fields", ", ".join(f.accepted_fields)))
    if f.quantised_as is not None:
        rows[-1] = ("checkpoint", gigabytes(f.checkpoint_bytes))
        rows.append(("weights", f"{f.quantised_as}; others {f.stored_as}"))
    if f.kernel_bytes_per_token is not None:
        read = gigabytes(f.kernel_bytes_per_token)
        rows.append(("on a GPU", f"{read} of weights read per token, as they are stored"))
    if f.adapter is not None:
        ranks = ", ".join(map(str, f.adapter.ranks))
        of_rank = f" of rank {ranks}" if ranks else ""
        told = f"{gigabytes(f.adapter.bytes)}{of_rank}, changes {f.adapter.tensors} tensors"
        rows.append(("adapter", f"{f.adapter.name}: {told}"))
    kept = "" if f.kv is None else f" in {f.kv}"
    for name, p in f.by_precision.items():
        verdict = "fits" if p.fits else "does not fit"
        if p.experts_in_files:
            verdict += " on a CPU, where experts stay in the files"
        rows.append(
            (
                f"in {name}",
                f"{gigabytes(p.streamed_bytes_per_token)} of weights read per token + "
                f"{gigabytes(p.kv_bytes_per_token)} of KV cache{kept} for each token of context; "
                f"memory {gigabytes(p.memory_bytes)} ({verdict})",
            )
        )
    rows.append(("free memory", gigabytes(f.available_memory_bytes)))
    return rows
