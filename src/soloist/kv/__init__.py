"""The KV cache: how a page is laid out, where pages lie, and whose they are.

`layout` says where keys and values lie in a page, for Python and CUDA; `pool` has the pages on the
device and `offload` their copies in the host's memory. `allocator` allocates pages to sequences and
frees them. `tiers` caches prompts in pages of the device or the host, with a `free_list` for each;
`chunks` says where prompts are cut, and `prefix` is the tree of what is cached. `folder` has files
of cached chunks, `saving` writes and reads them beside the work, and `page_copies` copies pages for
that. `memory` counts the bytes of positions. Must not know the maths of models, requests or
schedules.
"""
