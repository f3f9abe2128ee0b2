"""The KV cache: how a page is laid out, where pages lie, and whose they are.

`layout` says where keys and values lie in a page, for Python and CUDA; `pool` has the pages on the
device and `offload` their copies in the host's memory. `allocator` allocates pages to sequences and
frees them, from a `free_list`, and caches prompts in them: `chunks` says where prompts are cut, and
`prefix` is the tree of what is cached. Must not know models' maths, requests or schedules.
"""
