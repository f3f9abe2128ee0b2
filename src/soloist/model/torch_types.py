"""What precisions and weights are in torch: all that those who only use weights know of them."""

import torch
from torch import Tensor

from soloist.model.dtype import Dtype

TORCH_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}

# By the name of each `TensorSpec`.
Weights = dict[str, Tensor]
