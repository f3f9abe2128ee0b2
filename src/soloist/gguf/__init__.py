"""The container GGUF: what a file's header says. Knows neither models nor tokenizers.

    tensor_types   how many numbers a block of each type holds, in how many bytes
    names          which files are GGUF files
    header         metadata and places of tensors, held against the file's length
    splits         a model over several files

Source: the specification of GGUF, ggml's docs/gguf.md. `soloist.model.gguf` makes a configuration
and a checkpoint of it, `soloist.text.gguf` a tokenizer.
"""
