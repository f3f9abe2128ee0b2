"""What a checkpoint's matrices are once they are loaded: as stored, or rounded to codes. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from soloist.errors import CheckpointError, SettingError
from soloist.model.checkpoint import Checkpoint, stored_dtype
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import tensors
from soloist.model.quantized import Codes, Quantized, rounded
from soloist.model.stored import PLAIN
from soloist.model.tensors import Source, TensorSpec


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the matrices of a 16-bit checkpoint are rounded to.

    Attributes:
        layers: codes of the layers' matrices; None leaves them as they are.
        head: codes of the LM head; None leaves it as it is.
    """

    layers: Codes | None = None
    head: Codes | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model as it is loaded.

    Attributes:
        config: what it computes. A head that is rounded is not tied.
        specs: its tensors; an untied head may come from the embedding's.
        stored: quantised matrices by name, of one kind each.
        rounding: those of them that the files have in 16 bits.
        in_files: the tensors of the files.
        neurons: by the name of a `down` whose codes lie by group, the columns [F] of the file in
            this order, numpy integers. Where it is kept as codes rows of gate and up have to be put
            into the same order: then no one else sees that neurons were moved.
    """

    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    stored: Mapping[str, Quantized]
    rounding: Mapping[str, Quantized]
    in_files: tuple[TensorSpec, ...]
    neurons: Mapping[str, Any] = field(default_factory=dict)


def choose(
    checkpoint: Checkpoint, config: ModelConfig, specs: tuple[TensorSpec, ...], to: Rounding
) -> Chosen:
    """What becomes of a checkpoint's matrices.

    Raises:
        SettingError: what is to be rounded is quantised already, or is no matrix.
        CheckpointError: it is in fp32, or a row has no groups of the right size.
    """
    asked, in_files, was_tied = _asked(config, specs, to), specs, config.tied_head
    if to.head is not None:
        config, specs = untied(config, specs)
    rounding: dict[str, Quantized] = {}
    for spec in specs:
        codes = asked.get(spec.name)
        if codes is not None:
            if spec.name != "head" or not was_tied or _embeds(checkpoint):
                _require_plain(checkpoint, spec, codes)
            dtypes = [dtype_of(checkpoint, source) for source in spec.sources]
            rounding[spec.name] = rounded(spec.sources[0].name, spec.shape[-1], codes, dtypes[0])
    stored = _stored(checkpoint, [spec for spec in specs if spec.name not in rounding])
    neurons = _neurons(checkpoint, specs, stored)
    stored |= {name: replace(stored[name], permuted=False) for name in neurons}
    return Chosen(config, specs, {**stored, **rounding}, rounding, in_files, neurons)


def left_in_files(chosen: Chosen, checkpoint: Checkpoint, dtype: Dtype) -> frozenset[str]:
    """Names of experts that a CPU can multiply with as they lie in the files, or none.

    All of them are stored as numbers of the run's precision. Then they need no memory of their own:
    files may be larger than that, and what tokens choose stays in it as long as there is room.
    """
    experts = [spec for spec in chosen.specs if spec.expert is not None]
    for spec in experts:
        if spec.name in chosen.stored or any(checkpoint.matrices(spec)):
            return frozenset()
        if any(PLAIN.get(checkpoint.tensors[s.name].dtype) is not dtype for s in spec.sources):
            return frozenset()
    return frozenset(spec.name for spec in experts)


def held_tensors(config: ModelConfig, in_files: frozenset[str]) -> tuple[TensorSpec, ...]:
    """All tensors of a model but those that stay in the files."""
    return tuple(spec for spec in tensors(config) if spec.name not in in_files)


def _stored(checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> dict[str, Quantized]:
    """Quantised matrices of the files, by name."""
    if checkpoint.quantization is None:
        return {}
    from soloist.model.quantization.matrices import joined

    found = {spec.name: joined(checkpoint.quantization, spec) for spec in specs}
    return {name: quantized for name, quantized in found.items() if quantized is not None}


def _neurons(
    checkpoint: Checkpoint, specs: Iterable[TensorSpec], stored: Mapping[str, Quantized]
) -> dict[str, Any]:
    """See `Chosen`; not of layers whose gate and up have rows that share scales."""
    found = {}
    for spec in specs:
        layer, _, short = spec.name.rpartition(".")
        down, gate_up = stored.get(spec.name), stored.get(f"{layer}.gate_up")
        if short != "down" or down is None or not down.permuted:
            continue
        if gate_up is None or gate_up.scale_rows == 1:
            (matrix,) = checkpoint.matrices(spec)
            assert matrix is not None, "it is quantised"
            assert checkpoint.quantization is not None, "and so are some matrices"
            found[spec.name] = checkpoint.quantization.sorted_columns(matrix)
    return found


def rounding_of(specs: Iterable[TensorSpec], to: Rounding, dtype: Dtype) -> dict[str, Quantized]:
    """What matrices become that are in `dtype`; a head that is rounded is not tied."""
    specs = tuple(specs)
    codes = {spec.name: to.layers for spec in specs if spec.is_layer_matrix}
    codes["head"] = to.head
    return {
        spec.name: rounded(spec.name, spec.shape[-1], own, dtype)
        for spec in specs
        if (own := codes.get(spec.name)) is not None
    }


def require_matrices(family: str, specs: Iterable[TensorSpec], to: Rounding) -> None:
    """What is to be rounded are matrices, of two dimensions.

    Raises:
        SettingError: they have more.
    """
    most = max(len(spec.shape) for spec in specs if spec.is_layer_matrix)
    for option, codes in (("--weights", to.layers), ("--head-weights", to.head)):
        if codes is not None and most > 2:
            allowed = f"none for {family}, whose matrices have {most} dimensions"
            hint = f"leave {option} out: this family runs in 16 bits"
            raise SettingError(option, codes.value, allowed, hint)


def untied(
    config: ModelConfig, specs: tuple[TensorSpec, ...]
) -> tuple[ModelConfig, tuple[TensorSpec, ...]]:
    """The same with a head of its own, which a tied one gets from the embedding's tensor."""
    if not config.tied_head:
        return config, specs
    (table,) = (spec for spec in specs if spec.name == "embedding")
    return replace(config, tied_head=False), (*specs, TensorSpec("head", table.sources))


def dtype_of(checkpoint: Checkpoint, source: Source) -> Dtype:
    """The type of a matrix that is rounded.

    Raises:
        CheckpointError: fp32, of which nobody knows whether it means more than 16 bits.
    """
    stored = checkpoint.tensors[source.name]
    dtype = stored_dtype(checkpoint, stored.dtype)
    if dtype is Dtype.FP32:
        raise CheckpointError(
            f"tensor '{source.name}' of {checkpoint.folder} is stored in fp32 (allowed: bf16 or "
            "fp16)",
            "convert the checkpoint to bf16 first, or use one that is",
        )
    return dtype


def _embeds(checkpoint: Checkpoint) -> bool:
    """Whether the embedding, from which a tied head comes, may be quantised; mostly it is not."""
    return checkpoint.quantization is not None and checkpoint.quantization.embeds


def _asked(config: ModelConfig, specs: Iterable[TensorSpec], to: Rounding) -> dict[str, Codes]:
    """Codes by the name of a matrix."""
    asked = {"head": to.head} if to.head is not None else {}
    if to.layers is not None:
        asked |= {spec.name: to.layers for spec in specs if spec.is_layer_matrix}
    require_matrices(config.family, specs, to)
    return asked


def _require_plain(checkpoint: Checkpoint, spec: TensorSpec, codes: Codes) -> None:
    quantised = [matrix for matrix in checkpoint.matrices(spec) if matrix is not None]
    if not quantised:
        return
    from soloist.model.quantization.matrices import in_words

    is_head = spec.name == "head"
    option, what = ("--head-weights", "head is") if is_head else ("--weights", "layers are")
    raise SettingError(
        option,
        codes.value,
        f"none, since its {what} quantised already: {in_words(quantised[0].scheme)}",
        f"leave {option} out, or give the 16-bit checkpoint that this one was made from",
    )
