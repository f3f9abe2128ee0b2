"""What several GPUs share: a model's parts, and access to each other's memory.

`share` splits a model over ranks: tensor parallelism, or `lanes`, which Laneformer brings along.
`peers` maps GPUs' memory into each other. Must not know kernels, files or torch.
"""
