"""Lists of modules, against the libraries that match them."""

import pytest
from compressed_tensors.utils.match import match_name
from hypothesis import given
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module

from soloist.model.quantization.fields import QuantizationFields
from soloist.model.quantization.names import (
    IsListed,
    by_compressed_tensors,
    by_substring,
    by_transformers,
    by_wildcards,
)

MODULES = st.sampled_from(
    [f"model.layers.{i}.{part}_proj" for i in (0, 1, 10, 11)
     for part in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.down")] + ["lm_head"]
)  # fmt: skip
KEYS = st.lists(
    st.sampled_from([
        "lm_head", "head", "model.layers.1", "model.layers.1.", "layers.1", "mlp.gate",
        "mlp.gate_proj", "gate_proj", "model.layers.1.self_attn.q_proj", "model", "",
        r"model\.layers\.\d+\.mlp", ".*self_attn.*", "re:.*self_attn", "re:model.layers.1",
        r"re:.*\.(0|1)\.mlp\..*$", "model.layers.(0|10)", "re:lm_head", "*lm_head*",
    ]),
    max_size=4,
)  # fmt: skip


def listed(how: object, keys: list[str]) -> IsListed:
    assert callable(how)
    found: IsListed = how(QuantizationFields({"names": keys}, "config.json", "x"), "names")
    return found


@given(module=MODULES, keys=KEYS)
def test_as_transformers(module: str, keys: list[str]) -> None:
    keys = [key for key in keys if not key.startswith(("re:", "*"))]
    assert listed(by_transformers, keys)(module) is not should_convert_module(module, keys)


@given(module=MODULES, keys=KEYS)
def test_as_compressed_tensors(module: str, keys: list[str]) -> None:
    wanted = any(match_name(module, key) for key in keys)
    assert listed(by_compressed_tensors, keys)(module) is wanted
    assert listed(by_compressed_tensors, [*keys, "Linear"])(module)


@pytest.mark.parametrize(
    ("key", "module", "wanted"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head*", "lm_head", True),
        ("*lm_head", "model.lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.gate_proj", True),
        ("model.layers.1", "model.layers.11.mlp.gate_proj", False),
        ("model.layers.1*", "model.layers.11.mlp.gate_proj", True),
        ("*.mlp.*", "model.layers.1.mlp.gate_proj", True),
        ("mlp", "model.layers.1.mlp.gate_proj", False),
    ],
)
def test_with_wildcards(key: str, module: str, wanted: bool) -> None:
    assert listed(by_wildcards, [key])(module) is wanted


@given(module=MODULES, keys=KEYS)
def test_by_a_part(module: str, keys: list[str]) -> None:
    assert listed(by_substring, keys)(module) is any(key in module for key in keys)
