"""Soloist: an inference engine for the speed of a single request.

Importing the package loads nothing heavy; the public names are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.engine import Engine, EngineConfig
    from soloist.errors import SoloistError
    from soloist.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["Engine", "EngineConfig", "SamplingParams", "SoloistError", "__version__"]

_HOMES = {
    "Engine": "soloist.engine",
    "EngineConfig": "soloist.engine",
    "SamplingParams": "soloist.sampling",
    "SoloistError": "soloist.errors",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module attribute may be
    if name not in _HOMES:
        raise AttributeError(f"module 'soloist' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
