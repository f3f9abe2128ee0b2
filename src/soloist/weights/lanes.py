"""Cut a rank's lanes out of a model's tensors. Torch, any device."""

from torch import Tensor
from torch.nn.functional import pad

from soloist.parallel.lanes import LaneShare, lane_of, rules_of
from soloist.weights.rope_order import rope_in_halves


def shard_lanes(share: LaneShare, name: str, values: Tensor) -> Tensor:
    """[lanes of the rank, ...]: a slice, since lanes come first; of a head of all, their rows.

    Args:
        share: whose.
        name: of the tensor, without 'layers.N.'.
        values: the whole tensor in the checkpoint's order.
    """
    rules, sizes = rules_of(share.whole), lane_of(share.whole)
    own, rows = slice(share.lanes.start, share.lanes.stop), share.vocabulary
    if name == "qkv":
        return rope_in_halves(share.whole.rope, sizes.layers[0].attention, values[own], 1)
    if name == "head" and rules.head == "replicate":
        missing = sizes.vocab_size * len(share.lanes) - len(rows)
        padded = pad(values[rows.start : rows.stop], (0, 0, 0, missing))
        return padded.view(len(share.lanes), sizes.vocab_size, -1)
    if name == "embedding" or (name.endswith("norm") and rules.shared_norm_scales):
        return values
    return values[own]
