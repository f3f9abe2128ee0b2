"""Structures that the host and the kernel share lie as C would have them."""

import ctypes
import re

import numpy as np
import pytest

from soloist.megakernel.abi import (
    FAULT,
    LAUNCH,
    QUERY_START,
    SAMPLE_PARAMS,
    Struct,
    enumeration,
    params,
    structs,
)
from soloist.megakernel.limits import MAX_QUERIES

RANKS = (1, 2, 8)
_KINDS = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
}


def by_ctypes(struct: Struct) -> type[ctypes.Structure]:
    """The same fields, laid out by the platform's C rules."""
    fields = []
    for field in struct.fields:
        if isinstance(field.kind, Struct):
            kind = by_ctypes(field.kind)
        else:
            kind = ctypes.c_void_p if field.kind.endswith("*") else _KINDS[field.kind]
        fields.append((field.name, kind * field.length.value if field.length else kind))
    return type(struct.name, (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("ranks", RANKS)
def test_sizes_and_offsets_are_those_of_c(ranks: int) -> None:
    for struct in structs(ranks):
        wanted = by_ctypes(struct)
        assert (struct.num_bytes, struct.alignment) == (
            ctypes.sizeof(wanted),
            ctypes.alignment(wanted),
        )
        assert struct.offsets == {name: getattr(wanted, name).offset for name in struct.offsets}


@pytest.mark.parametrize("ranks", RANKS)
def test_records_lie_as_the_text_asserts(ranks: int) -> None:
    for struct in structs(ranks):
        dtype = struct.dtype
        assert dtype.itemsize == struct.num_bytes
        assert f"sizeof({struct.name}) == {struct.num_bytes}," in struct.cuda
        asserted = re.findall(r"OFFSET_OF\(\w+, (\w+)\) == (\d+)", struct.cuda)
        assert dict(asserted) == {n: str(dtype.fields[n][1]) for n in dtype.names}


def test_sizes_that_kernels_were_built_with() -> None:
    assert (QUERY_START.num_bytes, SAMPLE_PARAMS.num_bytes, FAULT.num_bytes) == (88, 64, 48)
    assert LAUNCH.num_bytes == 16 + MAX_QUERIES * (88 + 64 + 16)
    assert [params(ranks).num_bytes for ranks in RANKS] == [208, 216, 264]


def test_a_record_takes_every_field() -> None:
    fields = dict.fromkeys(QUERY_START.offsets, 0) | {"position": -1, "stops": range(16)}
    record = QUERY_START.record(**fields)
    assert record["position"] == -1
    assert record.tobytes()[-64:] == np.arange(16, dtype=np.uint32).tobytes()
    with pytest.raises(AssertionError, match="keep"):
        QUERY_START.record(**{k: v for k, v in fields.items() if k != "keep"})


def test_an_enumeration_counts_from_zero() -> None:
    wanted = "enum class Phase : u32 { kEmbed, kGateUp };"
    assert enumeration("Phase", ["embed", "gate_up"]) == wanted
