"""What a token makes a server's memory read, by its model's configuration. Pure.

For servers that only tell their model's name: who measures them says which model it is, how its
weights are stored, and how fast the server's memory reads.
"""

from dataclasses import dataclass
from pathlib import Path

from soloist.bench import record
from soloist.bench.sizes import require_at_least
from soloist.errors import SettingError, UserError
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config, tensors
from soloist.model.memory import kv_bytes_seen
from soloist.model.tensors import TensorSpec, streamed_values
from soloist.planning.precision import find_precision, streamed_bytes

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "int4", "fp4")


@dataclass(frozen=True, slots=True)
class Traffic:
    """A model in a server.

    Attributes:
        config, specs: the model and its tensors.
        precision: of `PRECISIONS`; below 16 bits that of the layers' matrices, beside a 16-bit KV
            cache.
        bandwidth: bytes a second that the server's memory, of all GPUs together, reads.
    """

    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    precision: str
    bandwidth: float

    def bytes_at(self, position: int) -> int:
        """Weights, keys and values that the token at `position` has to read."""
        tied = self.config.tied_head
        if self.precision == "fp32":
            weights = streamed_values(self.specs, tied_head=tied) * Dtype.FP32.num_bytes
            return weights + kv_bytes_seen(self.config, Dtype.FP32, position)
        weights = streamed_bytes(self.specs, find_precision(self.precision), tied_head=tied)
        return weights + kv_bytes_seen(self.config, Dtype.BF16, position)


def read_traffic(config: Path, precision: str, bandwidth: Path, gpus: int = 1) -> Traffic:
    """The model of a configuration on the machine of a result file.

    Args:
        config: a config.json.
        precision: one of `PRECISIONS`.
        bandwidth: result file of `soloist bench bandwidth` on the server's machine, of one GPU.
        gpus: that share the model, and read it together.

    Raises:
        ConfigError: the configuration cannot be used.
        SettingError: there is no such precision or number of GPUs.
        UserError: the file cannot be read, or holds no bandwidth.
    """
    if precision not in PRECISIONS:
        raise SettingError("--precision", precision, ", ".join(PRECISIONS))
    require_at_least(("--gpus", gpus, 1))
    model = read_config(config)
    found = [row for row in record.read(bandwidth) if row.get("bench") == "bandwidth"]
    if len(found) != 1:
        raise UserError(
            f"{bandwidth} holds {len(found)} rows of bandwidth, not one",
            "on the server's machine: soloist bench bandwidth -o FILE",
        )
    rate = float(found[0]["gb_per_s"]["median"]) * 1e9 * gpus
    return Traffic(model, tensors(model), precision, rate)
