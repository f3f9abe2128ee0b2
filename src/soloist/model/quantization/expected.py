"""What a configuration says of a model's matrices where there are no files of it."""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from soloist.errors import ConfigError
from soloist.model.dtype import Dtype
from soloist.model.quantization.matrices import Quantization, joined, may_be_quantised
from soloist.model.quantization.scheme import Method, Role, Scheme, is_head, is_router
from soloist.model.quantized import Quantized
from soloist.model.stored import PLAIN, StoredTensor
from soloist.model.tensors import Source, TensorSpec


def expected_matrices(
    method: Method, specs: Iterable[TensorSpec], dtype: Dtype, file: Path
) -> dict[str, Quantized]:
    """The matrices that files of such a configuration have as codes, by name.

    Where a configuration leaves it to the files, a head and routers are numbers: so libraries write
    them. Scales are of the type of all else where their format may have it.

    Args:
        method: of the configuration.
        specs: the model's tensors.
        dtype: of what is not quantised.
        file: the configuration's.

    Raises:
        GroupMismatch: groups do not divide a matrix's columns.
        ConfigError: columns belong to groups in an order that only files have.
    """
    method = cache(method)
    specs = [spec for spec in specs if may_be_quantised(spec)]
    tensors = {
        tensor.name: tensor
        for spec in specs
        for source in spec.sources
        for tensor in _tensors(source, _scheme(source, method), dtype, file)
    }
    quantization = Quantization(method, tensors, _unread)
    found = {spec.name: joined(quantization, spec) for spec in specs}
    return {name: quantized for name, quantized in found.items() if quantized is not None}


def _module(source: Source) -> str:
    return source.name.removesuffix(".weight")


def _scheme(source: Source, method: Method) -> Scheme | None:
    module = _module(source)
    allowed = method(module)
    is_left_out = is_router(module) or (is_head(module) and None in allowed)
    return None if is_left_out else allowed[0]


def _tensors(
    source: Source, scheme: Scheme | None, dtype: Dtype, file: Path
) -> Iterator[StoredTensor]:
    own = next(name for name, plain in PLAIN.items() if plain is dtype)
    if scheme is None:
        yield StoredTensor(source.name, file, source.shape, own)
        return
    module, (rows, columns) = _module(source), source.shape
    for role, part in scheme.parts((rows, columns), module).items():
        if part.needed and role is Role.GROUPS:
            raise ConfigError(
                f"{file} has columns of {module} in groups whose order only weights say",
                "set 'desc_act' to false, or measure a folder that has weights",
            )
        if part.needed:
            stored = own if own in part.dtypes else part.dtypes[0]
            yield StoredTensor(f"{module}.{part.suffix}", file, part.shapes[0], stored)


def _unread(tensor: StoredTensor) -> Any:  # noqa: ANN401 - as of `Quantization`
    raise AssertionError(f"{tensor.name} has no values")
