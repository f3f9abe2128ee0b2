"""NVIDIA's Python bindings, imported when first used: most machines have no use for them."""

import importlib
from typing import Any

from soloist.errors import CudaMissing

_INSTALL = "install the packages: pip install cuda-bindings nvidia-cuda-nvrtc (Linux only)"


def nvrtc() -> Any:  # noqa: ANN401 - the bindings have no types
    """`cuda.bindings.nvrtc` with its library loaded, so that calls cannot fail for want of it."""
    module = _binding("nvrtc")
    try:
        module.nvrtcVersion()
    except RuntimeError as error:  # no libnvrtc, or one of another major version
        raise CudaMissing("the CUDA compiler library (libnvrtc)", str(error), _INSTALL) from error
    return module


def driver() -> Any:  # noqa: ANN401 - the bindings have no types
    """`cuda.bindings.driver` with its library loaded; the driver itself may not be initialised."""
    module = _binding("driver")
    try:
        module.cuDriverGetVersion()
    except RuntimeError as error:
        hint = "install the display driver, or pass the GPU through to this container"
        raise CudaMissing("the NVIDIA driver (libcuda)", str(error), hint) from error
    return module


def _binding(name: str) -> Any:  # noqa: ANN401 - the bindings have no types
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CudaMissing("the Python package 'cuda-bindings'", str(error), _INSTALL) from error
