"""The sources of prefill's kernels for one model: compiled where it runs, or ahead of that."""

from collections.abc import Mapping
from dataclasses import dataclass

from soloist.jit.source import Source
from soloist.model.config import ModelConfig
from soloist.model.dtype import Dtype
from soloist.prefill.first_attention import first_attention_source, has_first_attention
from soloist.prefill.gate_up import gate_up_source, has_gate_up
from soloist.prefill.header import header
from soloist.prefill.page_form import PageForm
from soloist.prefill.residual_streams import residual_streams_of

_ELEMENTWISE, _LANES = "kernels/prefill.cu", "kernels/lane_prefill.cu"


@dataclass(frozen=True, slots=True)
class PrefillSources:
    """What is compiled for a model, or one rank's share of it.

    Attributes:
        elementwise: what runs between products, but for `lanes`, and SwiGLU of the first layer.
        lanes: the same of a model with lanes.
        swiglu: by neurons of an MLP or expert, as many as one lane has.
        gate_up: gate_up with SwiGLU, by neurons; of those MLPs that have such a kernel.
        attention: of all passes from KV pages, or else of first chunks; None where a library does
            all of it.
    """

    elementwise: Source
    lanes: Source | None
    swiglu: Mapping[int, Source]
    gate_up: Mapping[int, Source]
    attention: Source | None

    @property
    def all(self) -> tuple[Source, ...]:
        """Each once."""
        whole = (self.lanes, self.attention)
        found = (self.elementwise, *self.swiglu.values(), *self.gate_up.values(), *whole)
        return tuple(dict.fromkeys(source for source in found if source is not None))


def prefill_sources(
    config: ModelConfig, dtype: Dtype, arch: str, ranks: int = 1, pages: PageForm | None = None
) -> PrefillSources:
    """What prefill of a model, or of one rank's share of it, runs on an architecture.

    Args:
        config: as of `header`.
        dtype: of weights and of what products read.
        arch: such as 'sm_90a'.
        ranks: over how many the model is spread.
        pages: how passes attend to KV pages; None where these are gathered.
    """
    streams = residual_streams_of(config)
    found = [mlp for x in config.layers for mlp in (x.each_mlp, x.common_mlp) if mlp is not None]
    mlps = dict.fromkeys(mlp.intermediate_size for mlp in found)  # in order
    common = [layer.common_mlp for layer in config.layers]
    dense = {mlp.intermediate_size for mlp in common if mlp is not None}
    specs = {n // streams.count: header(config, dtype, ranks, n) for n in mlps}
    spec, head_dim = next(iter(specs.values())), config.layers[0].attention.head_dim
    attention = None if pages is None else pages.source
    if pages is None and has_first_attention(arch, head_dim):
        attention = first_attention_source(head_dim, dtype)
    return PrefillSources(
        elementwise=Source(_ELEMENTWISE, spec),
        lanes=None if config.lanes is None else Source(_LANES, spec),
        swiglu={n: Source(_ELEMENTWISE, own) for n, own in specs.items()},
        gate_up={
            n: gate_up_source(own)
            for n, own in specs.items()
            if n in dense and streams.fuses_gate_up and has_gate_up(arch, config.hidden_size, n)
        },
        attention=attention,
    )
