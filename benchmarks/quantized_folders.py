"""Write model folders as other libraries write them: random weights of a shape, quantised.

    python benchmarks/quantized_folders.py build/quantized/int4/llama-3.1-8b

A folder's path says what is in it: it ends with a form of `FORMS` and the name of a file in
`benchmarks/shapes`. `-outliers` after the name makes one channel of the activations a hundred times
as large as the rest, as trained models have some: in what every norm gives, and in what each `down`
reads. Codes, scales and config.json come from compressed-tensors and transformers themselves. The
forms `gguf-…` are one GGUF file each; gguf-py writes them, and the tests' own code its K-quants.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soloist.bench.folder import plain_config, random_tensors, write_model
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.folder import shipped_folder
from soloist.model.gguf.rope_freqs import ROPE_FREQS

SHAPES = Path(__file__).resolve().parent / "shapes"
_TESTS = Path(__file__).resolve().parents[1] / "tests"
OUTLIERS = "-outliers"
_CHANNEL, _TIMES = 7, 100
_BLOCK = (128, 128)
_HEAD = "lm_head"

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}

# A module's name and its matrix [N, K] → the tensors of a file.
Store = Callable[[str, Tensor], Mapping[str, Tensor]]
# Writes a new folder, of a config.json.
Writer = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class Form:
    """How a file holds a model's matrices.

    Attributes:
        config: of config.json, under 'quantization_config'; None: nothing is quantised.
        layers: of a layer's matrix.
        head: of the LM head's; None leaves it in 16 bits, and tied where the shape ties it.
    """

    config: Mapping[str, Any] | None = None
    layers: Store | None = None
    head: Store | None = None


def main(given: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="…/FORM/SHAPE",
        help=f"new folders; FORM is {', '.join(FORMS)}; SHAPE may end with {OUTLIERS}",
    )  # fmt: skip
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="folder of config.json files")
    asked = parser.parse_args(given)
    for folder in asked.folders:
        write(folder, asked.shapes)
    return 0


def write(folder: Path, shapes: Path = SHAPES) -> None:
    """Write a folder; what was begun is removed where that fails. Values are drawn on a GPU if any.

    Raises:
        SystemExit: the path names no form or shape, the folder is there, or a library is missing.
    """
    shape, form = shapes / f"{folder.name.removesuffix(OUTLIERS)}.json", folder.parent.name
    if form not in FORMS and form not in GGUF:
        allowed = ", ".join((*FORMS, *GGUF))
        raise SystemExit(f"{folder}: form '{form}' (allowed: {allowed}); end with F/SHAPE")
    if not shape.is_file():
        known = ", ".join(sorted(file.stem for file in shapes.glob("*.json")))
        raise SystemExit(f"{folder}: shape '{shape.stem}' (allowed: {known})")
    if form in GGUF and folder.name.endswith(OUTLIERS):
        raise SystemExit(f"{folder}: {OUTLIERS} is not for GGUF files; take another form")
    if folder.exists():
        raise SystemExit(f"{folder} is there already: remove it, or name another")
    try:
        write_to = _in_gguf(GGUF[form]) if form in GGUF else _in_form(FORMS[form]())
    except ImportError as error:
        raise SystemExit(
            f"{folder}: the form '{form}' needs a library that is not here ({error}): "
            "pip install compressed-tensors transformers gguf"
        ) from error
    start = time.monotonic()
    try:
        write_to(folder, shape)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{time.monotonic() - start:6.1f} s  {folder}: {size / 1e9:.2f} GB", flush=True)


def config_of(shape: Path, made: Form) -> dict[str, Any]:
    """The config.json of a shape in such a form."""
    config = plain_config(shape) | {"torch_dtype": "bfloat16"}
    if made.config is not None:
        config["quantization_config"] = made.config
    if made.head is not None:
        config["tie_word_embeddings"] = False
    return config


def _in_form(made: Form) -> Writer:
    def write_to(folder: Path, shape: Path) -> None:
        stored = _stored(shape, made, outliers=folder.name.endswith(OUTLIERS))
        write_model(folder, config_of(shape, made), stored)

    return write_to


def _in_gguf(type_of: Callable[[str, int], str]) -> Writer:
    """One file of the plain shape, with étude's tokenizer: its ids are the lowest."""
    sys.path.append(str(_TESTS))
    from unit.gguf.writing import tokenizer_of
    from unit.gguf.writing import write as write_gguf

    def write_to(folder: Path, shape: Path) -> None:
        config, values = read_config(shape), plain_config(shape)
        made = random_tensors(tensors(config), Dtype.BF16, _device())
        drawn = {name: tensor.cpu() for name, tensor in made}
        plain = replace(config.rope, scaling=None).inverse_frequencies(values["head_dim"])
        scaled = config.rope.inverse_frequencies(values["head_dim"])
        divisors = [a / b for a, b in zip(plain, scaled, strict=True)]
        folder.mkdir(parents=True)
        write_gguf(
            folder / f"{folder.name}.gguf", values, drawn,
            lambda name: type_of(name, values["num_hidden_layers"]),
            tokenizer_of(shipped_folder("etude"), "llama-bpe"),
            {ROPE_FREQS: np.array(divisors, np.float32)},
        )  # fmt: skip

    return write_to


def _as_q4_k_m(name: str, num_layers: int) -> str:
    """As llama.cpp mixes it: some matrices have six bits, in half of the layers."""
    part = name.split(".")[-2]
    if part in ("embed_tokens", "lm_head"):
        return "Q6_K"
    layer = int(name.split(".")[2])
    ends = num_layers // 8
    has_more = layer < ends or layer >= num_layers - ends or (layer - ends) % 3 == 2
    return "Q6_K" if part in ("v_proj", "down_proj") and has_more else "Q4_K"


def _device() -> torch.device:
    """Where values are drawn."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _stored(shape: Path, form: Form, *, outliers: bool) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the files."""
    config = read_config(shape)
    specs = tensors(config if form.head is None else replace(config, tied_head=False))
    stores = {
        source.name: form.layers if spec.is_layer_matrix else form.head
        for spec in specs
        if spec.is_layer_matrix or spec.name == "head"
        for source in spec.sources
    }
    for name, values in random_tensors(specs, Dtype.BF16, _device()):
        if outliers and name.endswith(("norm.weight", "up_proj.weight")):
            values[_CHANNEL] *= _TIMES
        store = stores.get(name)
        if store is None:
            yield name, values
        else:
            yield from store(name.removesuffix(".weight"), values).items()


def _compressed(
    layers: Mapping[str, Any], head: Mapping[str, Any] | None = None, form: str = "pack-quantized"
) -> Form:
    """As compressed-tensors stores it without calibration."""
    from compressed_tensors.quantization import QuantizationConfig

    groups = {"group_0": _scheme(["Linear"] if head is None else ["re:.*_proj$"], layers)}
    if head is not None:
        groups["group_1"] = _scheme([_HEAD], head)
    config = QuantizationConfig(
        config_groups=groups, format=form, quantization_status="compressed",
        ignore=[_HEAD] if head is None else [],
    )  # fmt: skip
    return Form(
        {**config.to_dict(), "quant_method": "compressed-tensors"},
        _compressor(form, layers),
        None if head is None else _compressor(form, head),
    )


def _scheme(targets: list[str], weights: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the library's
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=targets, weights=QuantizationArgs(**weights))


def _compressor(form: str, arguments: Mapping[str, Any]) -> Store:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = _scheme(["Linear"], arguments)
    compressor = BaseCompressor.get_value_from_registry(form)

    def store(module: str, values: Tensor) -> dict[str, Tensor]:
        grouped = values.unflatten(1, (-1, scheme.weights.group_size or values.shape[1]))
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales, zeros = calculate_qparams(low, high, scheme.weights)
        state = {"weight": values, "weight_scale": scales, "weight_zero_point": zeros}
        made = compressor.compress(state, scheme)
        return {f"{module}.{part}": tensor for part, tensor in made.items()}

    return store


def _fp8_blocks() -> Form:
    """As transformers stores it, and Qwen and DeepSeek publish it."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=_BLOCK, modules_to_not_convert=[_HEAD])
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def store(module: str, values: Tensor) -> dict[str, Tensor]:
        made: dict[str, Tensor] = quantize.convert({f"{module}.weight": values})
        assert len(made) == 2, f"{module} of {tuple(values.shape)} has no whole blocks of {_BLOCK}"
        return made

    return Form(config.to_dict(), store)


FORMS: Mapping[str, Callable[[], Form]] = {
    "bf16": Form,
    "int4": lambda: _compressed(_INT4),
    "int4-int8-head": lambda: _compressed(_INT4, head=_INT8),
    "int8": lambda: _compressed(_INT8),
    "fp8": lambda: _compressed(_FP8, form="float-quantized"),
    "fp8-block": _fp8_blocks,
}

# Which type a file has for a matrix, by its name and the number of layers.
GGUF: Mapping[str, Callable[[str, int], str]] = {
    "gguf-Q8_0": lambda _name, _layers: "Q8_0",
    "gguf-Q4_0": lambda _name, _layers: "Q4_0",
    "gguf-Q4_K_M": _as_q4_k_m,
}

if __name__ == "__main__":
    sys.exit(main())
