"""What becomes of each tensor of a 16-bit checkpoint that is quantised, and of its config.json.

Nothing is read but headers, configuration and an adapter, and nothing is written.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from soloist.errors import AlreadyQuantized, CheckpointError
from soloist.model.adapter import Adapter, open_adapter
from soloist.model.checkpoint import Checkpoint, open_checkpoint, stored_dtype
from soloist.model.config import ModelConfig
from soloist.model.families import FAMILIES, read_config, tensors
from soloist.model.folder import CONFIG_FILE
from soloist.model.quantized import GROUPS, Codes, Quantized, rounded
from soloist.model.reading import read_json
from soloist.model.stored import StoredTensor
from soloist.model.tensors import Source, TensorSpec
from soloist.weights.choice import dtype_of
from soloist.weights.compressed_tensors import entries, quantization_config
from soloist.weights.merging import require_numbers
from soloist.weights.writing import Entry

# The module of the LM head in every family whose tensors are matrices of Linear modules.
_HEAD = "lm_head"
# What other tools add for weights that are quantised: fields of config.json, a file beside it.
_SIGNS, _SIGN_FILE = ("quantization_config", "compression_config"), "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be quantised, and how.

    Attributes:
        layers: codes of the layers' matrices.
        head: codes of the LM head; None leaves it as it is.
        group: columns that share a scale of INT4, at most.
        accepted_fields: of config.json, that nobody knows; they are copied.
    """

    layers: Codes
    head: Codes | None = None
    group: int = GROUPS[0]
    accepted_fields: tuple[str, ...] = ()


class Part(Enum):
    """A part of a model."""

    LAYERS = "matrices of layers"
    HEAD = "LM head"
    REST = "everything else"


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint, and what is made of it.

    Attributes:
        source: the tensor.
        part: of the model that is made.
        module: whose matrix is quantised; None: the tensor is copied.
        quantized: how; None: the tensor is copied.
    """

    source: StoredTensor
    part: Part
    module: str | None = None
    quantized: Quantized | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What is written."""
        if self.module is None or self.quantized is None:
            return (_entry(self.source),)
        return entries(self.module, self.source.shape, self.quantized)

    @property
    def num_bytes(self) -> int:
        """Of what is written."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def source_bytes(self) -> int:
        """Of what is read."""
        return _entry(self.source).num_bytes


@dataclass(frozen=True, slots=True)
class Size:
    """A part's bytes, and how its matrices are stored: words of `Quantized.label` and groups."""

    part: Part
    tensors: int
    before_bytes: int
    after_bytes: int
    stored_as: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All that is to be written.

    Attributes:
        source: the folder of the checkpoint.
        pieces: in the order of the model.
        config: the fields of config.json.
        adapter: is merged into the pieces first.
    """

    source: Path
    pieces: tuple[Piece, ...]
    config: dict[str, Any]
    adapter: Adapter | None = None

    @property
    def num_bytes(self) -> int:
        """Weights that are written."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def format(self) -> str:
        """Of the folder, as compressed-tensors calls it."""
        return str(self.config["quantization_config"]["format"])

    def sizes(self) -> list[Size]:
        """Of each part; a tied head had no bytes of its own."""
        seen: set[str] = set()
        found: dict[Part, list[tuple[Piece, int]]] = {part: [] for part in Part}
        for piece in self.pieces:
            before = 0 if piece.source.name in seen else piece.source_bytes
            seen.add(piece.source.name)
            found[piece.part].append((piece, before))
        return [
            Size(
                part,
                tensors=len(pieces),
                before_bytes=sum(before for _, before in pieces),
                after_bytes=sum(piece.num_bytes for piece, _ in pieces),
                stored_as=tuple(dict.fromkeys(_stored_as(piece) for piece, _ in pieces)),
            )
            for part, pieces in found.items()
            if pieces
        ]


def plan_export(source: Path, asked: Asked, adapter_folder: Path | None = None) -> ExportPlan:
    """What becomes of a checkpoint, and of an adapter's folder that is merged into it.

    Raises:
        AlreadyQuantized, NoGroupFits, CheckpointError, ConfigError: it cannot be quantised so.
        SettingError: the model takes no adapter.
    """
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is a GGUF file; soloist quantize takes a folder with safetensors in 16 bits",
            "give the checkpoint that the file was made from",
        )
    fields = read_json(source / CONFIG_FILE)
    _require_plain(source, fields)
    config = read_config(source / CONFIG_FILE, asked.accepted_fields)
    _require_text_alone(config, fields)
    specs = tensors(config)
    _require_matrices(config, specs)
    checkpoint = open_checkpoint(source)
    checkpoint.check(specs, FAMILIES[config.family].ignored(config))
    for tensor in checkpoint.tensors.values():
        stored_dtype(checkpoint, tensor.dtype)  # refuses codes, which only config.json explains
    adapter = None
    if adapter_folder is not None:
        adapter = open_adapter(adapter_folder, checkpoint, specs)
        require_numbers(adapter)
    pieces = _pieces(checkpoint, specs, asked)
    if asked.head is not None:
        pieces = _with_head(checkpoint, pieces, specs, config, asked)
        if config.tied_head:
            fields = {**fields, "tie_word_embeddings": False}
    config_fields = {**fields, "quantization_config": _quantization(pieces)}
    return ExportPlan(source, tuple(pieces), config_fields, adapter)


def _require_plain(source: Path, fields: dict[str, Any]) -> None:
    for name in _SIGNS:
        given = fields.get(name)
        if given is not None:
            method = given.get("quant_method") if isinstance(given, dict) else None
            told = f" of {method}" if isinstance(method, str) else ""
            raise AlreadyQuantized(str(source), f"{CONFIG_FILE} has a {name}{told}")
    if (source / _SIGN_FILE).exists():
        raise AlreadyQuantized(str(source), f"it holds {_SIGN_FILE}")


def _require_text_alone(config: ModelConfig, fields: dict[str, Any]) -> None:
    if "text_config" in fields:
        raise CheckpointError(
            f"the family '{config.family}' has a vision tower beside its text, whose modules a "
            "quantised copy would have to name (allowed: models of text alone)",
            "give --weights to the command that runs the model: it rounds while it loads",
        )


def _require_matrices(config: ModelConfig, specs: tuple[TensorSpec, ...]) -> None:
    if config.mixtures:
        raise CheckpointError(
            f"the family '{config.family}' has mixtures of experts, of which no quantised copies "
            "are made (allowed: models with an MLP in every layer)",
            "give --weights to the command that runs the model: it rounds while it loads",
        )
    sources = (source for spec in specs if spec.is_layer_matrix for source in spec.sources)
    for source in sources:
        if len(source.shape) != 2:
            raise CheckpointError(
                f"the family '{config.family}' keeps '{source.name}' in {len(source.shape)} "
                f"dimensions, {list(source.shape)}; compressed-tensors stores only matrices "
                "(allowed: 2 dimensions)",
                "use this model in 16 bits, or quantise a model of another family",
            )


def _pieces(checkpoint: Checkpoint, specs: tuple[TensorSpec, ...], asked: Asked) -> list[Piece]:
    """Matrices of layers are quantised, and every other tensor of the files is copied."""
    pieces = {}
    for spec in specs:
        for source in spec.sources:
            if spec.is_layer_matrix:
                piece = _quantized(checkpoint, source, Part.LAYERS, asked.layers, asked.group)
            else:
                part = Part.HEAD if spec.name == "head" else Part.REST
                piece = Piece(checkpoint.tensors[source.name], part)
            pieces[source.name] = piece
    for name, stored in checkpoint.tensors.items():
        pieces.setdefault(name, Piece(stored, Part.REST))
    return list(pieces.values())


def _with_head(
    checkpoint: Checkpoint,
    pieces: list[Piece],
    specs: tuple[TensorSpec, ...],
    config: ModelConfig,
    asked: Asked,
) -> list[Piece]:
    """The head quantised; a tied one becomes a matrix of its own beside the 16-bit embedding."""
    assert asked.head is not None, "there is a head to quantise"
    wanted = "embedding" if config.tied_head else "head"
    source = next(spec.sources[0] for spec in specs if spec.name == wanted)
    head = _quantized(checkpoint, source, Part.HEAD, asked.head, asked.group, _HEAD)
    # Also not copied: what some checkpoints of tied models hold under the head's name.
    return [*(piece for piece in pieces if piece.source.name != f"{_HEAD}.weight"), head]


def _quantized(
    checkpoint: Checkpoint,
    source: Source,
    part: Part,
    codes: Codes,
    group: int,
    module: str | None = None,
) -> Piece:
    stored = checkpoint.tensors[source.name]
    dtype = dtype_of(checkpoint, source)
    quantized = rounded(source.name, source.shape[1], codes, dtype, group)
    return Piece(stored, part, module or source.name.removesuffix(".weight"), quantized)


def _quantization(pieces: list[Piece]) -> dict[str, Any]:
    made = {p.module: p.quantized for p in pieces if p.module is not None and p.quantized}
    head = made.pop(_HEAD, None)
    return quantization_config(made, _HEAD, head)


def _entry(stored: StoredTensor) -> Entry:
    return Entry(stored.name, stored.dtype, stored.shape)


def _stored_as(piece: Piece) -> str:
    quantized = piece.quantized
    if quantized is None:
        return piece.source.dtype.lower()
    return quantized.label + (f" g{quantized.group}" if quantized.group else "")
