"""How the format compressed-tensors stores quantised matrices: names, tensors, config.json.

INT4 and INT8 are its `pack-quantized` for 16-bit activations: words of 32 bits, the first code in
the lowest bits, with 2^(bits - 1) added. FP8 is its `float-quantized` with one scale a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from soloist.model.dtype import Dtype
from soloist.model.quantized import SCALES, Codes, Quantized
from soloist.weights.writing import Entry

_SCALE_DTYPES = {Dtype.FP32: "F32", Dtype.BF16: "BF16", Dtype.FP16: "F16"}
_MIXED = "mixed-precision"


def entries(module: str, shape: tuple[int, ...], quantized: Quantized) -> tuple[Entry, ...]:
    """What a file holds of a module's matrix."""
    rows, columns = shape
    scales = Entry(
        f"{module}.weight_scale",
        _SCALE_DTYPES[quantized.scale_dtype],
        (rows, quantized.groups(columns)),
    )
    if quantized.codes is Codes.FP8:
        return (Entry(f"{module}.weight", "F8_E4M3", (rows, columns)), scales)
    words = -(-columns * quantized.codes.bits // 32)
    return (
        Entry(f"{module}.weight_packed", "I32", (rows, words)),
        scales,
        Entry(f"{module}.weight_shape", "I64", (2,)),
    )


def stored(module: str, parts: Mapping[str, Tensor], quantized: Quantized) -> dict[str, Tensor]:
    """A matrix's codes and scales as a file holds them, by the names of `entries`."""
    codes, scales = parts[""], parts[SCALES]
    made = {f"{module}.weight_scale": scales}
    if quantized.codes is Codes.FP8:
        return made | {f"{module}.weight": codes}
    rows, width = codes.shape
    bytes_ = codes
    if quantized.codes is Codes.INT8:
        bytes_ = codes.view(torch.uint8) ^ 0x80  # what adding 128 does to a byte
    bytes_ = pad(bytes_, (0, -width % 4)).contiguous()
    shape = torch.tensor([rows, width * 8 // quantized.codes.bits])
    return made | {
        f"{module}.weight_packed": bytes_.view(torch.int32),
        f"{module}.weight_shape": shape,
    }


def quantization_config(
    layers: Mapping[str, Quantized], head_module: str, head: Quantized | None
) -> dict[str, Any]:
    """What config.json says of the matrices, under the name 'quantization_config'.

    Args:
        layers: the modules of all layers.
        head_module: of the LM head. It is named in every case: for some engines it is a Linear
            module, and for others it is none.
        head: how it is quantised; None: it is not.
    """
    forms = set(layers.values())
    # Others write the class of all modules. It would reach a head that has a target of its own.
    by_class = head is None and len(forms) == 1
    by_form = {form: ["Linear"] for form in forms} if by_class else _targets(layers)
    if head is not None:
        by_form.setdefault(head, []).append(head_module)
    groups = [_group(quantized, targets) for quantized, targets in by_form.items()]
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [] if head is not None else [head_module],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(layers: Mapping[str, Quantized]) -> dict[Quantized, list[str]]:
    """Which modules are quantised how, in as few words as say it without a doubt."""
    forms: dict[str, set[Quantized]] = {}
    for module, quantized in layers.items():
        forms.setdefault(_kind(module), set()).add(quantized)
    targets: dict[Quantized, dict[str, None]] = {}
    for module, quantized in layers.items():
        is_clear = len(forms[_kind(module)]) == 1
        target = rf"re:.*\.{_kind(module)}$" if is_clear else module
        targets.setdefault(quantized, {})[target] = None
    return {quantized: list(names) for quantized, names in targets.items()}


def _kind(module: str) -> str:
    """Its place in any layer: 'q_proj'."""
    return module.rpartition(".")[2]


def _group(quantized: Quantized, targets: Sequence[str]) -> dict[str, Any]:
    is_float = quantized.codes is Codes.FP8
    return {
        "targets": list(targets),
        "format": "float-quantized" if is_float else "pack-quantized",
        "weights": {
            "num_bits": quantized.codes.bits,
            "type": "float" if is_float else "int",
            "symmetric": True,
            "strategy": "group" if quantized.group else "channel",
            "group_size": quantized.group or None,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
