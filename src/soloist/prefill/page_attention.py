"""Attention of passes straight from KV pages, by a kernel of ours on Hopper."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from soloist.jit.tensor_map import TensorMap, boxes_map
from soloist.kv.pool import PagePool
from soloist.prefill import hopper
from soloist.prefill.elementwise import Chunk
from soloist.prefill.page_form import (
    ENTRY,
    MERGE_ENTRY,
    MERGE_THREADS,
    THREADS,
    PageForm,
    launch_scale,
)


class PageAttention:
    """The kernels, compiled and loaded, and memory for sums of splits.

    Args:
        form: for the model.
        pool: has keys and values.
        cache_root: where compiled kernels are kept; None keeps none on disk.
        splits: whether there is room for sums of splits; without it there are none.

    Raises:
        DeviceError: it cannot be compiled or loaded.
    """

    def __init__(
        self,
        form: PageForm,
        pool: PagePool,
        cache_root: Path | None,
        *,
        splits: bool = True,
    ) -> None:
        self.form = form
        self._attend = hopper.load(form.source, ENTRY, form.shared_bytes, cache_root)
        self._merge = hopper.load(form.source, MERGE_ENTRY, 0, cache_root)
        address, pages = hopper.address(pool.tensor), pool.num_pages
        self._slots = form.partials_bytes(pages) // form.partial_bytes if splits else 0
        num_bytes = self._slots * form.partial_bytes
        self._partials = torch.empty(num_bytes, dtype=torch.uint8, device=pool.device)
        self._of_pool = (
            *(boxes_map(address, boxes) for boxes in form.keys(pages)),
            boxes_map(address, form.values(pages)),
        )
        self._maps_type = type(
            "PageMaps", (ctypes.Structure,),
            {"_fields_": [("maps", TensorMap * (1 + len(self._of_pool)))]},
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Of sums of splits."""
        return self._partials.numel()

    def launch(  # noqa: PLR0913 - what passes and models differ in
        self,
        queries: Tensor,
        chunk: Chunk,
        query_bounds: Tensor,
        layer: int,
        window: int | None,
        out: Tensor,
        stream: int,
        *,
        arranged: bool = False,
    ) -> None:
        """`out` = softmax(q kᵀ / √D) v, each query over the pool's keys up to its own position.

        A row's bits depend neither on how many rows there are, nor on which others. Where splits of
        its keys begin, and the order in which these are added, follow from positions.

        Args:
            queries: [rows, Q, D]; what `out` has for those behind the last one is undefined.
            chunk: whose keys and values are in the pool; the device reads where it ends.
            query_bounds: [2] int32, 0 and the number of queries, the last of which is at the
                chunk's end.
            layer: which one.
            window: how many of the latest keys a query sees, itself included; None means all.
            out: [rows, Q, D].
            stream: handle.
            arranged: of a row of `out` columns are in the order of `Products.takes_arranged`.
        """
        rows, _, head_dim = queries.shape
        of_queries = boxes_map(hopper.address(queries), self.form.queries(rows))
        maps = self._maps_type((TensorMap * (1 + len(self._of_pool)))(of_queries, *self._of_pool))
        to, partials = (ctypes.c_void_p(x.data_ptr()) for x in (out, self._partials))
        bounds = [ctypes.c_void_p(x.data_ptr()) for x in (query_bounds, chunk.key_bounds)]
        slots, own_window = ctypes.c_uint32(self._slots), ctypes.c_uint32(window or 0)
        scale, blocks = ctypes.c_float(launch_scale(head_dim)), self._attend.num_sms
        table = ctypes.c_void_p(chunk.page_table.data_ptr())
        order = ctypes.c_uint32(arranged)
        # Every SM gets a block: which work there is the device knows.
        self._attend.launch(
            blocks, THREADS, self.form.shared_bytes,
            (
                maps, to, partials, slots, table, *bounds, ctypes.c_uint32(layer), own_window,
                scale, order,
            ),
            stream, cooperative=False,
        )  # fmt: skip
        # A short prompt is one split, and without room for sums of splits there are none.
        if not self._slots or chunk.is_short_prompt:
            return
        self._merge.launch(
            self.form.merging_blocks(rows), MERGE_THREADS, 0,
            (to, partials, slots, *bounds, own_window, scale, ctypes.c_uint32(blocks), order),
            stream, cooperative=False,
        )  # fmt: skip
