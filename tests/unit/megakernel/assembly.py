"""What the compiler makes of a kernel before machine code: messages of its front end, and PTX."""

from typing import Any

from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import OPTIONS
from soloist.jit.source import Source


def assembly(source: Source, arch: str) -> bytes:
    """PTX for `arch`, such as 'sm_80', with the zero byte at its end."""
    return _told(source, "PTX", f"--gpu-architecture={arch.replace('sm', 'compute')}")


def front_end_log(source: Source, arch: str) -> str:
    """What the front end says, which instantiates all templates and makes no code.

    Empty where it accepts the source without a warning.
    """
    told = _told(source, "ProgramLog", f"--gpu-architecture={arch}", "--fdevice-syntax-only")
    return told.rstrip(b"\0\n ").decode(errors="replace")


def _told(source: Source, what: str, *more: str) -> bytes:
    """One of NVRTC's results, with the zero byte at its end."""
    library, headers = nvrtc(), source.headers
    names, texts = [n.encode() for n in headers], [t.encode() for t in headers.values()]
    _, program = library.nvrtcCreateProgram(
        source.text.encode(), source.kernel.encode(), len(names), texts, names
    )
    options = [option for option in OPTIONS if not option.startswith("--ptxas")]
    encoded = [option.encode() for option in (*options, *more)]
    (result,) = library.nvrtcCompileProgram(program, len(encoded), encoded)
    log = _content(library, program, "ProgramLog")
    assert int(result) == 0, log.decode(errors="replace")
    told = log if what == "ProgramLog" else _content(library, program, what)
    library.nvrtcDestroyProgram(program)
    return told


def _content(library: Any, program: Any, what: str) -> bytes:
    content = bytes(getattr(library, f"nvrtcGet{what}Size")(program)[1])  # bindings write into it
    getattr(library, f"nvrtcGet{what}")(program, content)
    return content
