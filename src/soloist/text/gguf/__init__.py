"""The tokenizer and the chat templates that a GGUF file's metadata describes.

    vocabulary  tokens, their types, merges and scores, each checked
    splitting   how text falls into words, by the names that llama.cpp gives to tokenizers
    backend     all of these → a tokenizer of the package `tokenizers`

Knows neither models nor tensors. Source: what llama.cpp's converter writes and `llama_vocab` reads.
"""
