"""Memory of tensors that are alive on the CPU, by what operations make."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storage that operations of this thread allocate while it is entered.

    Mapped files, and what was there before, are not counted, nor are views of them.

    Attributes:
        most_bytes: that were alive after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and _place(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[_place(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: kept for k, kept in self._alive.items() if not kept[0].expired()}
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        return made

    @property
    def now_bytes(self) -> int:
        """Alive now."""
        return sum(size for kept, size in self._alive.values() if not kept.expired())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
