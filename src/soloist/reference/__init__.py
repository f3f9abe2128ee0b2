"""The definition of the maths in plain PyTorch, and the device where no GPU is supported.

`blocks` holds attention and MLP, `transformer` puts them together, `laneformer` does so with lanes.
"""

from soloist.reference.build import Reference, build_reference
from soloist.reference.cache import KVCache

__all__ = ["KVCache", "Reference", "build_reference"]
