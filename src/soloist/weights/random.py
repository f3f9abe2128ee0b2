"""Weights that no checkpoint has: random ones, to measure shapes."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from soloist.model.dtype import Dtype
from soloist.model.quantized import SCALES, ZEROS, Codes, Quantized
from soloist.model.tensors import TensorSpec
from soloist.model.torch_types import TORCH_DTYPES, Weights
from soloist.weights.numbers import packed

_FP8_NAN = 0x7F  # with either sign


def random_weights(
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    device: torch.device,
    seed: int = 0,
    *,
    home: torch.device | None = None,
    stored: Mapping[str, Quantized] | None = None,
) -> Weights:
    """All of `random_tensors`, by name."""
    return dict(random_tensors(specs, dtype, device, seed, home=home, stored=stored))


def random_tensors(
    specs: Iterable[TensorSpec],
    dtype: Dtype,
    device: torch.device,
    seed: int = 0,
    *,
    home: torch.device | None = None,
    stored: Mapping[str, Quantized] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Weights for benchmarks: normal values scaled so that activations keep their size.

    Each is drawn when it is asked for.

    Args:
        specs: names and shapes.
        dtype: of the result; values are drawn in 32 bits.
        seed: of the first tensor's numbers; the others follow it.
        device: draws them; another kind of device draws other numbers.
        home: where they lie afterwards; `device` if None.
        stored: by name, matrices that are drawn as codes, with scales; never as numbers.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    for spec in specs:
        quantized = (stored or {}).get(spec.name)
        if quantized is not None:
            for part, values in _random_parts(spec, quantized, generator).items():
                yield spec.name + part, values.to(home or device)
            continue
        values = torch.empty(spec.shape, dtype=torch.float32, device=device)
        if spec.name.endswith("norm"):
            values.fill_(1.0)
        else:
            values.normal_(0.0, spec.shape[-1] ** -0.5, generator=generator)
        yield spec.name, values.to(TORCH_DTYPES[spec.held_in(dtype)]).to(home or device)


def _random_parts(spec: TensorSpec, to: Quantized, generator: torch.Generator) -> dict[str, Tensor]:
    """Codes of all sizes, as many below zero as above; equal scales, and zeros about the middle."""
    assert not to.has_offsets, "no configuration says so of a shape"
    (rows, columns), device = spec.shape, generator.device
    shape = (rows, to.groups(columns))

    def drawn(
        low: int, high: int, dtype: torch.dtype, shape: tuple[int, int] = (rows, columns)
    ) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype, device=device)

    if to.codes is Codes.INT4:
        codes = packed(drawn(1, 16, torch.uint8))
        sizes = torch.arange(-7.0, 8.0)
    elif to.codes is Codes.INT8:
        codes = drawn(-127, 128, torch.int8)
        sizes = torch.arange(-127.0, 128.0)
    else:
        codes = drawn(0, 2 * _FP8_NAN, torch.uint8)
        codes += codes >= _FP8_NAN
        codes = codes.view(torch.float8_e4m3fn)
        sizes = torch.arange(_FP8_NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale = columns**-0.5 / float(sizes.square().mean().sqrt())
    scales = torch.full(shape, scale, device=device).to(TORCH_DTYPES[to.scale_dtype])
    parts = {"": codes, SCALES: scales}
    if to.has_zeros:
        is_int4 = to.codes is Codes.INT4
        low, high, dtype = (7, 10, torch.uint8) if is_int4 else (-8, 9, torch.int8)
        parts[ZEROS] = drawn(low, high, dtype, shape)
    return parts
