"""Models as people have them: configuration, tensors, files and memory.

`config` is what a model is, `families` read it from `config.json`, `checkpoint` opens the files,
`quantization` says how they store matrices that are quantised, `quantized` what such a matrix is.
`gguf` makes configuration and tensors of a GGUF file.
Nothing here reads tensors or computes a forward pass.
"""
