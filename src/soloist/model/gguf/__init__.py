"""A GGUF file as a model: what the rest of the engine takes for config.json and safetensors.

    naming         names of tensors, here and there
    configuration  metadata → the fields of an equivalent config.json, which the family reads
    rope_freqs     divisors of rope's frequencies, which a tensor holds
    tensors        tensors under the names that families know, and where their bytes lie
    choosing       which file of a folder is meant
    promise        what the first bytes of a file on the hub say

`soloist.gguf` reads headers, `soloist.weights.decoding.by_blocks` the numbers. Pure: no torch.
"""
