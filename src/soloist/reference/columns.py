"""Several tokens of a sequence in one step of the reference, each with the bits of its own step.

Products are made row by row (`Step.by_rows`), so they are those of single steps by construction.
What is left works on each row by itself, but a library may take other instructions for other
shapes: whether bits stay the same is tried on the machine, with the shapes of the model.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from soloist.model.config import Layer, Mixture, ModelConfig
from soloist.reference.blocks import Rotary, Step, activate, rms_norm
from soloist.reference.cache import KVCache, Scratch

# Tokens that a step may take so.
MOST_COLUMNS = 8

# A matrix of so many bytes stays in a core's cache from one row to the next. Larger ones are read
# for each row anew, and several rows cost as much as several steps.
_MOST_MATRIX_BYTES = 16 * 2**20
# Products with heads that do not begin at a multiple of 64 bytes have other bits.
_ALIGNED_VALUES = 16


def columns_pay(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether several tokens in one step cost less than several steps, and have the same bits.

    docs/speculation.md has what was measured. The lanes of Laneformers mix in further operations,
    which nobody tried, and tokens that choose other experts share no matrices.
    """
    if device.type != "cpu" or dtype is not torch.float32 or config.lanes is not None:
        return False
    if any(isinstance(layer.mlp, Mixture) for layer in config.layers):
        return False
    rows = [config.vocab_size]
    if any(layer.attention.head_dim % _ALIGNED_VALUES for layer in config.layers):
        return False
    for layer in config.layers:
        rows += [layer.attention.qkv_rows, 2 * layer.dense_mlp.intermediate_size]
    largest = max(rows) * config.hidden_size * dtype.itemsize
    return largest <= _MOST_MATRIX_BYTES and rows_keep_bits(config)


@torch.inference_mode()
def rows_keep_bits(config: ModelConfig) -> bool:
    """Whether operations on several rows give the bits of the same on each row, on a CPU."""
    generator = torch.Generator().manual_seed(0)
    for work, shape in _operations(config):
        x = 3 * torch.randn(MOST_COLUMNS, *shape, generator=generator)
        single = [work(x[i : i + 1].clone(), i) for i in range(MOST_COLUMNS)]
        for count in range(2, MOST_COLUMNS + 1):
            if not torch.equal(work(x[:count].clone(), 0), torch.cat(single[:count])):
                return False
    return True


# Rows [T, ...] of which the first is at this position, to rows.
_Work = Callable[[Tensor, int], Tensor]


def _operations(config: ModelConfig) -> Iterator[tuple[_Work, tuple[int, ...]]]:
    """What blocks do beside products, and with rows of which shape."""
    device = torch.device("cpu")
    epsilon, scratch = torch.tensor(config.norm_epsilon), Scratch(device)

    def norm(x: Tensor, _: int) -> Tensor:
        return rms_norm(x, torch.ones(x.shape[-1]), epsilon, torch.empty_like(x), scratch)

    def activated(layer: Layer) -> _Work:
        ffn = layer.dense_mlp.intermediate_size

        def work(x: Tensor, _: int) -> Tensor:
            activate(x[:, :ffn], layer.dense_mlp.activation)
            return x[:, :ffn].clone()

        return work

    def rotated(rotary: Rotary) -> _Work:
        def work(x: Tensor, position: int) -> Tensor:
            cache = KVCache([], MOST_COLUMNS, x.dtype, device)
            step = Step(position, x.shape[0], (rotary,), cache, scratch)
            out = torch.empty_like(x)
            step.rotate(rotary.pairs(x), rotary.pairs(out), 0)
            return out

        return work

    yield norm, (config.hidden_size,)
    for layer in dict.fromkeys(config.layers):
        a, dim = layer.attention, layer.attention.head_dim
        yield activated(layer), (2 * layer.dense_mlp.intermediate_size,)
        yield norm, (a.num_query_heads + a.num_kv_heads, dim)
        yield norm, (a.num_query_heads * dim,)
        yield norm, (a.num_kv_heads * dim,)
        for rope in config.ropes:
            rotary = Rotary(rope, dim, MOST_COLUMNS, device)
            yield rotated(rotary), (a.num_query_heads + a.num_kv_heads, dim)
