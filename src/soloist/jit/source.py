"""One kernel's source: an entry file, the generated header and everything that they include.

Includes are resolved from one root only, so that the digest covers all that the compiler can see.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from soloist.errors import BadInclude

CUDA_ROOT = Path(__file__).parents[1] / "cuda"
SPEC_HEADER = "spec.cuh"

# Raised when the same ingredients would be compiled or stored in another way.
_WRITER_VERSION = 1
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)
_QUOTED = re.compile(r'"([^"\n]+)"')


@dataclass(frozen=True)
class Source:
    """What is compiled. Files are read once, when first asked for.

    Attributes:
        kernel: entry file below `root`, such as 'kernels/decode.cu'.
        header: text that the files see as `#include "spec.cuh"`.
        root: the only folder that includes are resolved from.
    """

    kernel: str
    header: str
    root: Path = CUDA_ROOT

    @cached_property
    def headers(self) -> dict[str, str]:
        """Every file included, directly or not, by the name they use. Raises BadInclude."""
        found = {SPEC_HEADER: self.header}
        open_files = [(self.kernel, self.text), (SPEC_HEADER, self.header)]
        while open_files:
            includer, text = open_files.pop()
            for name in _includes(includer, text):
                if name not in found:
                    found[name] = self._read(name, includer)
                    open_files.append((name, found[name]))
        return dict(sorted(found.items()))

    @cached_property
    def text(self) -> str:
        """The entry file."""
        return self._read(self.kernel, "the kernel's name")

    def digest(self, arch: str, options: Sequence[str], nvrtc_version: tuple[int, int]) -> str:
        """SHA-256, as hex digits, over everything that decides what the compiler produces."""
        ingredients = {
            "writer": _WRITER_VERSION,
            "kernel": self.kernel,
            "text": self.text,
            "headers": self.headers,
            "arch": arch,
            "options": list(options),
            "nvrtc": list(nvrtc_version),
        }
        return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()

    def _read(self, name: str, includer: str) -> str:
        path = self.root / name
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise BadInclude(includer, f'"{name}"', "it lies outside the CUDA sources")
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            reason = f"{path} cannot be read ({error.strerror})"
            raise BadInclude(includer, f'"{name}"', reason) from error


def _includes(includer: str, text: str) -> list[str]:
    names = []
    for target in _INCLUDE.findall(text):
        quoted = _QUOTED.match(target)
        if quoted is None:
            reason = 'only "quoted" files of the CUDA sources exist where there is no toolkit'
            raise BadInclude(includer, target.strip(), reason)
        names.append(quoted[1])
    return names
