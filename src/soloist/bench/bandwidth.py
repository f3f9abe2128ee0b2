"""`bench bandwidth`: the read bandwidth that 'bytes over bandwidth' is held against, as a row."""

import torch

from soloist.bench import record, rows
from soloist.bench.caches import gpu_uuid
from soloist.bench.clocks import watching
from soloist.bench.others import others_counted
from soloist.engine.bandwidth import read_bandwidth
from soloist.engine.config import resolve_device
from soloist.engine.engine import device_name, devices


def measure(asked: str) -> rows.BandwidthRow:
    """A row for one device.

    Args:
        asked: 'auto', 'cpu', 'cuda' or 'cuda:N'.

    Raises:
        DeviceMissing: there is no such device.
    """
    device = torch.device(resolve_device(asked, devices()))
    with others_counted() as others, watching(gpu_uuid(device)) as watch:
        found = read_bandwidth(device)
    return rows.BandwidthRow(
        bench="bandwidth",
        device=device_name(str(device)),
        gpus=int(device.type == "cuda"),
        gb_per_s=rows.Spread.of(found.rates_gb_per_s),
        method=found.method,
        runs=len(found.rates_gb_per_s),
        clocks=watch.clocks,
        others_cores=others.cores,
        **record.origin("torch"),
    )
