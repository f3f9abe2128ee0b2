"""The metrics of many replicas as one text: each sample with the labels of where it comes from."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def merged(texts: Iterable[tuple[bytes, Mapping[str, str]]]) -> bytes:
    """In Prometheus' format.

    Args:
        texts: the metrics of each, in the same format, and labels for its samples.
    """
    families: dict[str, Metric] = {}
    for text, labels in texts:
        for read in text_string_to_metric_families(text.decode()):
            family = families.setdefault(
                read.name, Metric(read.name, read.documentation, read.type)
            )
            for sample in read.samples:
                if not sample.name.endswith("_created"):
                    family.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(_These(list(families.values())))
    return generate_latest(registry)


class _These(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """All of them."""
        return self._families
