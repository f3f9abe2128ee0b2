"""The definition of the maths in plain PyTorch, and the device where no GPU is supported.

`blocks` holds attention and MLP, `transformer` puts them together, `laneformer` does so with lanes;
`build` chooses. `memory` says without torch what they take.
"""
