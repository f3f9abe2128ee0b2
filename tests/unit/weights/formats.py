"""Every format that loads: how a matrix is quantised and stored in it, and what it then stands for.

AWQ and GPTQ are spelled out number by number; of compressed-tensors the library writes the tensors.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor


@dataclass(frozen=True)
class Matrix:
    """Random codes [N][K], zeros and scales [N][G]; column k is in group of[k]."""

    bits: int
    group: int
    codes: list[list[int]]
    zeros: list[list[int]]
    scales: Tensor
    of: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.of)

    @property
    def numbers(self) -> Tensor:
        """(code - zero) · scale, each of them."""
        rows, columns = self.shape
        wanted = torch.empty(rows, columns)
        for n in range(rows):
            for k in range(columns):
                g = self.of[k]
                wanted[n, k] = (self.codes[n][k] - self.zeros[n][g]) * self.scales[n, g].float()
        return wanted


def matrix(
    rows: int, columns: int, group: int, bits: int = 4, *, sym: bool = False, least: int = 0,
    seed: int = 0, shuffled: bool = False, dtype: torch.dtype = torch.float16,
) -> Matrix:  # fmt: skip
    """`least`: of the zeros; a format that stores one less has none below 1."""
    draw, most = random.Random(seed), 2**bits - 1
    groups = columns // (columns if group == -1 else group)
    zeros = [[draw.randint(least, most) for _ in range(groups)] for _ in range(rows)]
    places = [k * groups // columns for k in range(columns)]
    if shuffled:
        draw.shuffle(places)
    return Matrix(
        bits,
        group,
        [[draw.randint(0, most) for _ in range(columns)] for _ in range(rows)],
        [[2 ** (bits - 1)] * groups for _ in range(rows)] if sym else zeros,
        torch.tensor([[draw.uniform(0.01, 0.1) for _ in range(groups)] for _ in range(rows)]).to(
            dtype
        ),
        places,
    )


def word(fields: list[int], bits: int) -> int:
    """A signed 32-bit word, the first field in its lowest bits."""
    value = sum(field << (bits * i) for i, field in enumerate(fields))
    return value - 2**32 if value >= 2**31 else value


def awq(m: Matrix) -> dict[str, Tensor]:
    """Eight rows in a word; from the lowest bits on rows 0, 2, 4, 6, 1, 3, 5, 7."""

    def packed(of_rows: list[int]) -> list[int]:
        return [
            word([of_rows[i + r] for r in (0, 2, 4, 6, 1, 3, 5, 7)], 4)
            for i in range(0, len(of_rows), 8)
        ]

    (rows, columns), groups = m.shape, m.scales.shape[1]
    return {
        "qweight": torch.tensor(
            [packed([m.codes[n][k] for n in range(rows)]) for k in range(columns)],
            dtype=torch.int32,
        ),
        "qzeros": torch.tensor(
            [packed([m.zeros[n][g] for n in range(rows)]) for g in range(groups)],
            dtype=torch.int32,
        ),
        "scales": m.scales.t().contiguous(),
    }


def gptq(m: Matrix, offset: int = 1, *, has_groups: bool = True) -> dict[str, Tensor]:
    """Consecutive columns in a word of codes, consecutive rows in one of zeros less `offset`."""
    (rows, columns), groups, each = m.shape, m.scales.shape[1], 32 // m.bits
    tensors = {
        "qweight": torch.tensor(
            [
                [word(m.codes[n][k : k + each], m.bits) for n in range(rows)]
                for k in range(0, columns, each)
            ],
            dtype=torch.int32,
        ),
        "qzeros": torch.tensor(
            [
                [
                    word([m.zeros[n + r][g] - offset for r in range(each)], m.bits)
                    for n in range(0, rows, each)
                ]
                for g in range(groups)
            ],
            dtype=torch.int32,
        ),
        "scales": m.scales.t().contiguous(),
    }
    if has_groups:
        tensors["g_idx"] = torch.tensor(m.of, dtype=torch.int32)
    return tensors


# --- weights of a model, rounded to the nearest --------------------------------------------------

Stored = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """A quantisation of all matrices.

    Attributes:
        name: for test ids.
        config: `quantization_config`; None where another file says it.
        store: a matrix as tensors by suffix, and the numbers that they stand for.
        others: a second way, of modules whose name has this in it; None leaves them in 16 bits.
        files: beside config.json.
    """

    name: str
    config: dict[str, Any] | None
    store: Callable[[Tensor], Stored]
    others: dict[str, Callable[[Tensor], Stored] | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def of(self, module: str, weight: Tensor) -> Stored:
        """The tensors of a module, by whole names."""
        store = next((how for part, how in self.others.items() if part in module), self.store)
        if store is None:
            return {f"{module}.weight": weight}, weight
        tensors, numbers = store(weight)
        return {f"{module}.{suffix}": t.contiguous() for suffix, t in tensors.items()}, numbers


def rounded(weight: Tensor, bits: int, group: int, *, sym: bool, least: int = 0) -> Matrix:
    """The nearest codes, scales in fp16."""
    most = 2**bits - 1
    size = weight.shape[1] if group == -1 else group
    grouped = weight.unflatten(1, (-1, size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    if sym:
        scales = (torch.maximum(-low, high) / (most // 2)).half()
        zeros = torch.full_like(low, (most + 1) // 2)
    else:
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(least, most)
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return Matrix(
        bits,
        group,
        codes.flatten(1).int().tolist(),
        zeros.int().tolist(),
        scales,
        [k // size for k in range(weight.shape[1])],
    )


def like_awq(group: int, *, sym: bool = False) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        m = rounded(weight, 4, group, sym=sym)
        return awq(m), m.numbers

    return store


def like_gptq(
    bits: int,
    group: int,
    *,
    sym: bool,
    offset: int = 1,
    order_of: Callable[[int], Tensor] = torch.arange,
) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        order = order_of(weight.shape[1])
        back = order.argsort()
        m = rounded(weight[:, order], bits, group, sym=sym, least=offset)
        codes = torch.tensor(m.codes)[:, back].tolist()
        m = Matrix(bits, group, codes, m.zeros, m.scales, torch.tensor(m.of)[back].tolist())
        return gptq(m, offset), m.numbers

    return store


def one_order(columns: int) -> Tensor:
    """The same for all matrices that are so wide, as those with the same activations have it."""
    return torch.randperm(columns, generator=torch.Generator().manual_seed(columns))


def float8(
    rows: int, columns: int, suffix: str, shape: tuple[int, ...] | None = None
) -> Callable[[Tensor], Stored]:
    """A scale for `rows` × `columns`, 0 for all; tensors of scales in this shape."""

    def store(weight: Tensor) -> Stored:
        down, across = rows or weight.shape[0], columns or weight.shape[1]
        parts = [list(part.split(across, 1)) for part in weight.split(down, 0)]
        scales = torch.stack(
            [torch.stack([block.abs().max() / 448 for block in line]) for line in parts]
        )
        wide = scales.repeat_interleave(down, 0).repeat_interleave(across, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored = scales if shape is None else scales.reshape(shape)
        return {"weight": codes, suffix: stored}, codes.float() * wide

    return store


def compressed(stored: str, **arguments: Any) -> Callable[[Tensor], Stored]:
    """As the library of compressed-tensors stores it and reads it back, in fp32."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(stored)
    most = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1

    def store(weight: Tensor) -> Stored:
        size = args.group_size if args.strategy == "group" else weight.shape[1]
        grouped = weight.unflatten(1, (-1, size))
        low, high = grouped.amin(-1), grouped.amax(-1)
        state = {"weight": weight}
        if args.symmetric:
            state["weight_scale"] = torch.maximum(-low, high) / most
            state["weight_zero_point"] = torch.zeros_like(low, dtype=torch.int8)
        else:
            state["weight_scale"] = (high - low) / (2 * most + 1)
            zeros = (-low / state["weight_scale"]).round() - most - 1
            state["weight_zero_point"] = zeros.clamp(-most - 1, most).to(torch.int8)
        tensors = compressor.compress(state, scheme)
        if args.symmetric:
            tensors.pop("weight_zero_point", None)
        return tensors, compressor.decompress(dict(tensors), scheme)["weight"].float()

    return store


def in_groups(stored: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
        "ignore": ["lm_head"],
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        **more,
    }


def group(weights: dict[str, Any], *targets: str, **more: Any) -> dict[str, Any]:
    return {
        "targets": list(targets or ("Linear",)),
        "weights": {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, **weights},
        "input_activations": None,
        "output_activations": None,
        **more,
    }


def ints(bits: int, strategy: str, *, symmetric: bool = True, size: int | None = None) -> Any:
    return {
        "num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric,
        "group_size": size,
    }  # fmt: skip


_FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 40]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
_HEAD: dict[str, Callable[[Tensor], Stored] | None] = {"lm_head": None}

FORMATS = [
    Format("fp8-blocks", _FP8, float8(48, 40, "weight_scale_inv"), _HEAD),
    Format("fp8-blocks-head", _FP8, float8(48, 40, "weight_scale_inv")),
    Format(
        "fp8-listed",
        {**_FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp", r"layers.\d+.o_proj",
                                            "self_attn.k_proj"]},
        float8(48, 40, "weight_scale_inv"),
        {**_HEAD, "layers.0.mlp": None, "self_attn.k_proj": None},
    ),
    Format(
        "fp8-matrix",
        {**_FP8, "weight_block_size": None},
        float8(0, 0, "weight_scale_inv", ()),
        _HEAD,
    ),
    Format(
        "auto-fp8",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        float8(0, 0, "weight_scale", (1,)),
        _HEAD,
    ),
    Format(
        "fbgemm",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
         "modules_to_not_convert": ["lm_head", "o_proj"]},
        float8(1, 0, "weight_scale"),
        {**_HEAD, "o_proj": None},
    ),
    Format(
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.layers.1.mlp*"],
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
         "producer": {"name": "modelopt", "version": "0.41"}},
        float8(0, 0, "weight_scale", ()),
        {**_HEAD, "layers.1.mlp": None},
    ),
    Format(
        "modelopt-file",
        None,
        float8(0, 0, "weight_scale", ()),
        _HEAD,
        {"hf_quant_config.json": '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": '
                                 'null, "exclude_modules": ["lm_head"]}}'},
    ),
    Format(
        "float-quantized",
        in_groups("float-quantized", group(_FLOATS, input_activations=_DYNAMIC)),
        compressed("float-quantized", **_FLOATS),
        _HEAD,
    ),
    Format(
        "int-quantized",
        in_groups("int-quantized", group(ints(8, "channel", symmetric=False))),
        compressed("int-quantized", **ints(8, "channel", symmetric=False)),
        _HEAD,
    ),
    Format(
        "pack-quantized",
        in_groups("pack-quantized", group(ints(4, "group", size=32))),
        compressed("pack-quantized", **ints(4, "group", size=32)),
        _HEAD,
    ),
    Format(
        "pack-quantized-zeros",
        in_groups("pack-quantized", group(ints(4, "group", size=32, symmetric=False)), ignore=[]),
        compressed("pack-quantized", **ints(4, "group", size=32, symmetric=False)),
    ),
    Format(
        "pack-quantized-8",
        in_groups("pack-quantized", group(ints(8, "channel")), ignore=["re:.*lm_head", "re:.*up"]),
        compressed("pack-quantized", **ints(8, "channel")),
        {**_HEAD, "up_proj": None},
    ),
    Format(
        "mixed-precision",
        in_groups(
            "mixed-precision",
            group(ints(4, "group", size=32), format="pack-quantized"),
            group(_FLOATS, r"re:.*self_attn\..*", format="float-quantized"),
            group(ints(8, "channel"), "model.layers.1.self_attn.o_proj", format="int-quantized"),
        ),
        compressed("pack-quantized", **ints(4, "group", size=32)),
        {
            **_HEAD,
            "layers.1.self_attn.o_proj": compressed("int-quantized", **ints(8, "channel")),
            "self_attn": compressed("float-quantized", **_FLOATS),
        },
    ),
    Format("awq", _AWQ, like_awq(32), _HEAD),
    Format(
        "awq-listed",
        {**_AWQ, "modules_to_not_convert": ["lm_head", "layers.0."]},
        like_awq(32),
        {**_HEAD, "layers.0.": None},
    ),
    Format("gptq", _GPTQ, like_gptq(4, 32, sym=True), _HEAD),
    Format("gptq-zeros", {**_GPTQ, "sym": False}, like_gptq(4, 32, sym=False), _HEAD),
    Format(
        "gptq-8-v2",
        {**_GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2", "lm_head": True},
        like_gptq(8, 32, sym=False, offset=0),
    ),
    Format(
        "gptq-ordered",
        {**_GPTQ, "desc_act": True},
        like_gptq(4, 32, sym=True, order_of=one_order),
        _HEAD,
    ),
    Format(
        "gptq-ordered-zeros",
        {**_GPTQ, "bits": 8, "sym": False, "desc_act": True, "lm_head": True},
        like_gptq(8, 32, sym=False, order_of=one_order),
    ),
    Format(
        "gptq-orders",
        {**_GPTQ, "desc_act": True},
        like_gptq(4, 32, sym=True, order_of=torch.randperm),
        _HEAD,
    ),
    Format(
        "gptq-dynamic",
        {**_GPTQ, "dynamic": {r"-:.*\.1\.mlp": {}, r"+:.*\.o_proj": {"bits": 8, "group_size": -1}}},
        like_gptq(4, 32, sym=True),
        {**_HEAD, "layers.1.mlp": None, "o_proj": like_gptq(8, -1, sym=True)},
    ),
    Format(
        "auto-round",
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
         "packing_format": "auto_round:auto_gptq", "data_type": "int"},
        like_gptq(4, 32, sym=True),
        _HEAD,
    ),
]  # fmt: skip
