"""Whether machine code writes registers that a product under way still reads.

`wgmma` runs on by itself, and reads its first operand meanwhile where that is in registers. The
compiler takes these to be free after the next `wait_group`, also after one that lets products go
on. So the code of kernels that multiply in that way is walked here, instruction by instruction.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?) ;")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_PRODUCT = re.compile(r"[HQ]GMMA\S*\s+R\d+, R(\d+), ")
_BRANCH = re.compile(r"BRA\b.*`\((\.L_\w+)\)")
_RESULT = re.compile(r"(?:U?PT?\d*,\s*)*R(\d+)\b")
# Instructions whose first register is no result; all of the uniform datapath begin with U.
_NO_RESULT = (
    "ST", "RED", "BRA", "EXIT", "SYNCS", "BAR", "WARP", "NANOSLEEP", "R2UR", "ISETP", "FSETP",
    "PLOP3", "VOTEU", "HGMMA", "QGMMA", "LDGSTS", "DEPBAR", "MEMBAR", "FENCE", "CCTL", "BSSY",
    "BSYNC", "U",
)  # fmt: skip
_OPERAND_REGISTERS = 4


def disassembler() -> str | None:
    """NVIDIA's `nvdisasm`: on the PATH, or of the package nvidia-cuda-nvdisasm; None without."""
    if (found := shutil.which("nvdisasm")) is not None:
        return found
    spec = find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    places = (place for root in roots for place in sorted(Path(root).glob("*/bin/nvdisasm")))
    return next((str(place) for place in places), None)


def overwritten(cubin: Path, nvdisasm: str) -> list[str]:
    """Instructions that write an operand of a product which may not be done, in code order.

    A branch around products is taken to be not taken: whole blocks without work take it.
    """
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    code, labels = list[str](), dict[str, int]()
    for line in done.stdout.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1].strip())
    found, seen, todo = set[int](), set[object](), [(0, Products())]
    while todo:
        at, products = todo.pop()
        if at >= len(code) or (at, products) in seen:
            continue
        seen.add((at, products))
        text = _PREDICATE.sub("", code[at])
        if _written(text) & products.operands:
            found.add(at)
        todo += [(to, products.after(text)) for to in _next(code, labels, at, text)]
    return [code[at] for at in sorted(found)]


@dataclass(frozen=True, slots=True)
class Products:
    """Products under way.

    Attributes:
        groups: registers that each group reads, the oldest first.
        made: of the group that is being made.
    """

    groups: tuple[frozenset[int], ...] = ()
    made: frozenset[int] = frozenset()

    @property
    def operands(self) -> frozenset[int]:
        """Registers that nothing may write."""
        return self.made.union(*self.groups)

    def after(self, text: str) -> "Products":
        """An instruction, without its predicate."""
        if text.startswith("WARPGROUP.DEPBAR"):
            under_way = int(text.rsplit("0x", 1)[1], 16)
            return Products(self.groups[len(self.groups) - under_way :] if under_way else ())
        if not text.startswith("HGMMA"):
            return self
        made = self.made
        if operand := _PRODUCT.match(text):
            first = int(operand[1])
            made |= frozenset(range(first, first + _OPERAND_REGISTERS))
        return Products((*self.groups, made)) if "gsb0" in text else Products(self.groups, made)


def _next(code: list[str], labels: dict[str, int], at: int, text: str) -> Iterator[int]:
    """Where an instruction goes on."""
    is_sure = text == code[at] and not text.startswith("BRA P")
    branch = _BRANCH.match(text)
    if branch and (is_sure or not any("HGMMA" in one for one in code[at : labels[branch[1]]])):
        yield labels[branch[1]]
    if not (is_sure and (branch or text.startswith(("EXIT", "RET", "BPT.TRAP")))):
        yield at + 1


def _written(text: str) -> frozenset[int]:
    """Registers that an instruction writes, without its predicate."""
    name, _, rest = text.partition(" ")
    result = _RESULT.match(rest.strip())
    if name.startswith(_NO_RESULT) or result is None:
        return frozenset()
    is_pair = ".64" in name or "WIDE" in name or name.startswith("CS2R")
    count = 4 if ".128" in name or ".M88.4" in name else 2 if is_pair else 1
    return frozenset(range(int(result[1]), int(result[1]) + count))
