"""What a token makes a server's memory read, by its model's configuration. Pure.

For servers that only tell their model's name: who measures them says which model it is, how its
weights are stored, and how fast the server's memory reads.
"""

from dataclasses import dataclass
from pathlib import Path

from soloist.bench import record
from soloist.bench.sizes import require_at_least
from soloist.errors import SettingError, UserError
from soloist.model.dtype import Dtype
from soloist.model.kv_format import plain
from soloist.planning.bounds import kv_bytes_read, weight_bytes
from soloist.planning.model import Model
from soloist.planning.precision import SIXTEEN_BIT, find_precision
from soloist.planning.reading import read_model

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "int4", "fp4")


@dataclass(frozen=True, slots=True)
class Traffic:
    """A model in a server.

    Attributes:
        model: in figures; of a mixture a token reads the experts that it chooses.
        precision: of `PRECISIONS`; below 16 bits that of the layers' matrices, beside a 16-bit KV
            cache.
        bandwidth: bytes a second that the server's memory, of all GPUs together, reads.
    """

    model: Model
    precision: str
    bandwidth: float

    def bytes_at(self, position: int) -> int:
        """Weights, keys and values that the token at `position` has to read."""
        if self.precision == "fp32":
            weights = 2 * weight_bytes(self.model, SIXTEEN_BIT)
            return weights + kv_bytes_read(self.model, position, plain(Dtype.FP32))
        weights = weight_bytes(self.model, find_precision(self.precision))
        return weights + kv_bytes_read(self.model, position)


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
    model = read_model(config)
    found = [row for row in record.read(bandwidth) if row.get("bench") == "bandwidth"]
    if len(found) != 1:
        raise UserError(
            f"{bandwidth} holds {len(found)} rows of bandwidth, not one",
            "make the file on the server's machine: soloist bench bandwidth -o FILE",
        )
    rate = float(found[0]["gb_per_s"]["median"]) * 1e9 * gpus
    return Traffic(model, precision, rate)
