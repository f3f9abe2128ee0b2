"""`gptq`, as AutoGPTQ and GPTQModel write it: modules that have codes are quantised."""

from collections.abc import Callable

from soloist.errors import MissingField
from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import compiled
from soloist.model.quantization.scheme import Layout, Method, Scheme
from soloist.model.quantized import Codes
from soloist.model.reading import REQUIRED

# How it was found, who wrote it, and which kernels others run.
_IGNORED = (
    "quant_method", "method", "meta", "model_name_or_path", "model_file_base_name",
    "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "dataset",
    "tokenizer", "batch_size", "pad_token_id", "model_seqlen", "block_name_to_quantize",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "cache_block_outputs",
    "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length",
    "backend", "act_group_aware", "v2", "v2_alpha", "parallel_packing", "offload_to_disk",
    "offload_to_disk_path", "pack_impl", "hyb_act", "compression_ratio", "fail_safe", "failsafe",
    "gptaq", "gptaq_alpha", "foem", "hessian", "mock_quantization", "device",
)  # fmt: skip
_FORMATS = ("gptq", "gptq_v2")

# Before a pattern of `dynamic`: what matches stays in 16 bits.
_LEFT_OUT = "-:"


def read(fields: QuantizationFields) -> Method:
    """4 or 8 bits, and `dynamic` for modules that differ."""
    fields.one_of("is_marlin_format", (False,), default=False)
    fields.one_of("pack_dtype", ("int32",), "int32")
    stored = fields.one_of("checkpoint_format", _FORMATS, None)
    stored = fields.one_of("format", _FORMATS if stored is None else (stored,), stored or "gptq")
    usual = read_scheme(fields, None, zero_offset=1 if stored == "gptq" else 0)
    fields.ignore(*_IGNORED)
    dynamic = [
        (_matcher(fields, pattern), _read_override(usual, pattern, overrides))
        for pattern, overrides in fields.groups("dynamic").items()
    ]
    has_head = fields.flag("lm_head", None)
    fields.refuse_rest(frozenset())

    def of(module: str) -> tuple[Scheme | None, ...]:
        # The first pattern that matches decides; of others the tensors do.
        for matches, scheme in dynamic:
            if matches(module):
                return (scheme,)
        if module == "lm_head" and has_head is not None:
            return (usual,) if has_head else (None,)
        return (usual, None)

    return Method(fields.family, of)


def read_scheme(fields: QuantizationFields, usual: Scheme | None, *, zero_offset: int) -> Scheme:
    """A scheme of bits, group_size, sym and desc_act; what is absent is as in `usual`.

    Raises:
        ConfigError: a field is missing, or not one that is read.
    """
    bits = fields.one_of("bits", (4, 8), None if usual is None else usual.codes.bits)
    if bits is None:
        raise MissingField(fields.file, fields.path("bits"), "4 or 8")
    size = fields.integer("group_size", (usual.group or -1) if usual else REQUIRED, minimum=-1)
    if size == 0:
        raise fields.unsupported("group_size", size, "-1, or above 0")
    return Scheme(
        name=fields.family,
        layout=Layout.GPTQ,
        codes=Codes.INT4 if bits == 4 else Codes.INT8,
        group=max(size, 0),
        # Zeros are there in any case; symmetric are those that say nothing.
        symmetric=fields.flag("sym", default=usual.symmetric if usual else False),
        reordered=fields.flag("desc_act", default=usual.reordered if usual else False),
        zero_offset=zero_offset,
    )


def _read_override(usual: Scheme, pattern: str, fields: QuantizationFields) -> Scheme | None:
    if pattern.startswith(_LEFT_OUT):
        return None
    fields.ignore("mse", "damp_percent", "damp_auto_increment", "act_group_aware", "static_groups")
    scheme = read_scheme(fields, usual, zero_offset=usual.zero_offset)
    fields.refuse_rest(frozenset())
    return scheme


def _matcher(fields: QuantizationFields, pattern: str) -> Callable[[str], bool]:
    found = compiled(fields, "dynamic", pattern.removeprefix(_LEFT_OUT).removeprefix("+:"))
    return lambda module: found.match(module) is not None
