"""Models as people have them: configuration, tensors, files and memory.

`config` is what a model is, `families` read it from `config.json`, `checkpoint` opens the files,
`weights` turns them into tensors. Nothing here computes a forward pass.
"""
