"""What a kernel's machine code takes, and what was recorded of it."""

import json
import struct
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from soloist.jit.compiler import Cubin

RECORDED = Path(__file__).with_name("code_sizes.json")
# From Volta on: 16 bytes an instruction, whose lowest 12 bits are its kind; this one is padding.
INSTRUCTION_BYTES, KIND_BITS, NOTHING = 16, 0xFFF, 0x918


@dataclass(frozen=True)
class CodeSize:
    """Of one entry function; functions that it calls are not counted."""

    registers: int
    spill_bytes: int
    instructions: int
    code_bytes: int

    @classmethod
    def of(cls, cubin: Cubin, entry: str) -> "CodeSize":
        code = section(cubin.data, f".text.{entry}")
        words = struct.unpack(f"<{len(code) // 8}Q", code)
        taken = cubin.report.entries[entry]
        return cls(
            taken.registers,
            taken.spill_store_bytes + taken.spill_load_bytes,
            sum(word & KIND_BITS != NOTHING for word in words[::2]),
            len(code),
        )


def section(elf: bytes, name: str) -> bytes:
    """The content of a section of a 64-bit ELF file (System V ABI, chapter 4)."""
    table, size, count, names_at = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<II4Q", elf, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for at, _, _, _, offset, length in headers:
        begin = names + at
        if elf[begin : elf.index(0, begin)] == name.encode():
            return elf[offset : offset + length]
    raise KeyError(name)


def compare(name: str, found: CodeSize, config: pytest.Config) -> None:
    """Hold a build's code against the recorded one, or record it."""
    compiler = version("nvidia-cuda-nvrtc")
    recorded = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
    if config.getoption("--record-code-sizes"):
        recorded |= {"nvrtc": compiler, name: asdict(found)}
        RECORDED.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n", "utf-8")
        return
    if recorded["nvrtc"] != compiler:
        return  # another compiler makes other code
    assert asdict(found) == recorded.get(name), "meant? see the head of test_compile.py"
