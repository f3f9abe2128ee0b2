"""PTX of a kernel: what it asks of an architecture, and what newer GPUs can be given to run."""

from soloist.jit.bindings import nvrtc
from soloist.jit.compiler import OPTIONS
from soloist.jit.source import Source


def assembly(source: Source, arch: str) -> bytes:
    """PTX for `arch`, such as 'sm_80', with the zero byte at its end."""
    library, headers = nvrtc(), source.headers
    names, texts = [n.encode() for n in headers], [t.encode() for t in headers.values()]
    _, program = library.nvrtcCreateProgram(
        source.text.encode(), source.kernel.encode(), len(names), texts, names
    )
    options = [option for option in OPTIONS if not option.startswith("--ptxas")]
    options.append(f"--gpu-architecture={arch.replace('sm', 'compute')}")
    encoded = [option.encode() for option in options]
    assert int(library.nvrtcCompileProgram(program, len(encoded), encoded)[0]) == 0
    ptx = bytes(library.nvrtcGetPTXSize(program)[1])  # the bindings write into it
    library.nvrtcGetPTX(program, ptx)
    library.nvrtcDestroyProgram(program)
    return ptx
