"""The way of a weight byte, from a checkpoint's files to the order in which the kernel streams it.

One step a file, each of which knows only those before it:

    choice         what a checkpoint's matrices are once loaded: as stored, or rounded to codes
    formats        which of them the decode kernel takes quantised, and how
    upload         files → a GPU's memory, while Python still imports torch; so it imports no torch
    decoding       a quantised matrix's tensors on disk → codes, scales and zeros in rows
    quantizing     a 16-bit matrix → codes and scales, rounded to nearest
    numbers        these → the numbers that they stand for
    finite         refuses numbers that are none
    merging        a tensor and an adapter's factors → the tensor that both make
    reading        files → whole tensors; `random` makes some without files
    uploaded       files for `reading` that are in the GPU's memory already
    sharding       a whole tensor → a rank's share of it, by `lanes` where a rank has lanes
    distribution   all tensors → every rank's share, on its GPU
    loading        all of these in their order, for a model that is loaded
    packing        a matrix in rows → the kernel's order, and back
    packed         a rank's share → `PackedWeights` of the kernel, matrix by matrix
    unpacking      the same back to rows, a matrix at a time; of experts for prefill

`memory` says what they take, before the first step.

Another way leads from a 16-bit checkpoint to a folder with quantised weights:

    compressed_tensors   the format of the folder: names, tensors, config.json
    export_plan          what becomes of each tensor of a checkpoint
    writing              safetensors files, a tensor at a time
    export               all of these in their order

The decode kernel takes what was packed, prefill a function that gives rows; neither knows where
they come from. The folder stands on the kernel's plan, which says who owns which rows and in which
order. What the layers below know of weights is `soloist.model.torch_types`.
"""
