"""Prompts on one GPU or several: library products and attention, and the paged KV pool they fill.

`runner.Prefill` runs the parts of all ranks; a `part.Part` has one rank's pass over the layers
(`passes`), and what the pass is given: buffers, products, operations between them (`elementwise`,
`fused`), the attention of chunks, a communicator (`communicator`, `ranks`, `lanes`), and graphs.
What kinds of models ask of all these is in `residual_streams`.

The pool is what the decode kernel reads. Must not know text, files or requests.
"""
