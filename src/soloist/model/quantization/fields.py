"""Typed reading of `quantization_config`, with refusals that say what loads instead."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from soloist.errors import UnsupportedQuantization, WrongType
from soloist.model.reading import Fields

# Fields that say how codes and scales were found, who wrote them, which kernels others run, and
# what happens to activations. None of them changes what the tensors of a matrix mean.
MADE: Final = frozenset(
    """
    act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym activation_scale_ub
    activation_scheme amp autoround_version backend batch_size block_name_to_quantize
    cache_block_outputs compression_ratio damp_auto_increment damp_percent dataset dequantize device
    disable_exllama disable_opt_rtn do_fuse enable_alg_ext enable_minmax_tuning
    enable_norm_bias_tuning enable_opt_rtn enable_quanted_input enable_torch_compile exllama_config
    export_format fail_safe failsafe foem fuse_max_seq_len global_compression_ratio gptaq
    gptaq_alpha gradient_accumulate_steps hessian hyb_act input_activations iters
    low_cpu_mem_usage low_gpu_mem_usage lr lr_scheduler max_input_length meta method minmax_lr
    mock_quantization model_file_base_name model_free model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse nblocks
    not_use_best_mse nsamples observer observer_kwargs offload_to_disk offload_to_disk_path
    output_activations pack_impl pad_token_id parallel_packing producer provider quant_block_list
    quant_lm_head quant_method scale_dtype seed seqlen static_groups super_bits super_group_size
    supported_types to_quant_block_names tokenizer true_sequential use_cuda_fp16 use_exllama v2
    v2_alpha version zp_dtype
    """.split()  # noqa: SIM905 - one name a line would be four times as long
)

# A cache of keys and values in 8 bits. Here they stay in 16 bits, which loses nothing that it had.
CACHE: Final = ("kv_cache_scheme", "kv_cache_quant_algo")


class QuantizationFields(Fields):
    """The fields of a quantisation; `family` is its method."""

    def refuse_rest(
        self,
        harmless: frozenset[str] = MADE,
        neutral: Mapping[str, bool | float] = MappingProxyType({}),
    ) -> None:
        """Refuse, by name, what nobody asked for.

        Raises:
            UnsupportedQuantization: naming the first such field.
        """
        super().refuse_rest(harmless, neutral)

    def unsupported(self, name: str, value: object, allowed: str) -> UnsupportedQuantization:
        """The error for a value that would change what weights mean."""
        return UnsupportedQuantization(self.file, self.path(name), value, allowed)

    def unknown(self, name: str, value: object) -> UnsupportedQuantization:
        """The error for a field that nobody knows; none is accepted."""
        return self.unsupported(name, value, "absent")

    def strings(self, name: str) -> list[str]:
        """A list of texts; empty where it is absent or null."""
        value = self.value(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
            raise WrongType(self.file, self.path(name), value, "a list of names")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        """Two whole numbers above 0."""
        value = self.value(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in value)
        ):
            raise WrongType(self.file, self.path(name), value, "two whole numbers above 0")
        return value[0], value[1]

    def groups(self, name: str) -> "dict[str, QuantizationFields]":
        """Objects by name; none where the field is absent or null."""
        value = self.value(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or any(not isinstance(v, dict) for v in value.values()):
            raise WrongType(self.file, self.path(name), value, "an object of objects")
        return {
            key: QuantizationFields(inner, self.file, self.family, f"{self.path(name)}.{key}.")
            for key, inner in value.items()
        }

    def inner(self, name: str) -> "QuantizationFields | None":
        """A nested object."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise WrongType(self.file, self.path(name), value, "an object")
        return QuantizationFields(value, self.file, self.family, f"{self.path(name)}.")

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:  # noqa: ANN401
        """A value out of `allowed`; `default` where the field is absent or null."""
        value = self.value(name)
        if value is None:
            return default
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise self.unsupported(name, value, ", ".join(map(str, allowed)))
        return value
