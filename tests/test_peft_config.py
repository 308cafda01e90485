"""What a PEFT config may say: scales are taken, anything that the tensors cannot honour is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from difflora import DiffLoRAError
from difflora.peft_config import from_metadata, scaling


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "VERA"}, "another adapter type"),
        ({"peft_type": "IA3"}, "another adapter type"),
        ({"peft_type": "OFT", "coft": True}, "constrained OFT"),
        ({"peft_type": "OFT", "use_cayley_neumann": False}, "exact inverse"),
        ({"peft_type": "OFT", "num_cayley_neumann_terms": 7}, "another number of Cayley-Neumann terms"),
        ({"bias": "all"}, "trained biases"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"modules_to_save": ["proj_out"]}, "whole trained modules"),
        ({"layer_replication": [[0, 1]]}, "layer replication"),
        ({"target_parameters": ["x"]}, "bare parameters"),
        ({"trainable_token_indices": [1]}, "trained tokens"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"lora_alpha": 0}, "positive number"),
        ({"lora_alpha": True}, "positive number"),
        ({"r": 2.5}, "whole number"),
        ({"use_dora": "yes"}, "true or false"),
        ({"alpha_pattern": [1]}, "map of module patterns"),
    ],
    ids=str,
)
def test_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(DiffLoRAError, match=said):
        scaling(config, "x.safetensors")


def test_what_changes_nothing_is_no_reason() -> None:
    plain = scaling({"peft_type": "LORA", "bias": "none", "init_lora_weights": True, "coft": False, "r": 0}, "x")
    assert (plain.alpha, plain.rank, plain.rslora, plain.dora, plain.bias) == (None, None, False, False, False)


@pytest.mark.parametrize("name", ["lora_alpha", "alpha"])
def test_alpha_is_a_float_under_both_of_its_names(name: str) -> None:
    given = scaling({name: 0.5, "r": 4, "use_rslora": True, "use_dora": True, "lora_bias": True}, "x")
    assert (given.alpha, given.rank, given.rslora, given.dora, given.bias) == (0.5, 4, True, True, True)


def test_patterns_count_at_the_end_of_a_path_and_a_caret_anchors_them() -> None:
    config = {
        "lora_alpha": 8,
        "r": 4,
        "alpha_pattern": {"to_q": 2.5, "^proj_out": 1},
        "rank_pattern": {"blocks.1.proj_out": 6},
    }
    given = scaling(config, "x")
    assert given.alpha_of(("blocks.0.attn.to_q",), 4, "x") == 2.5
    assert given.alpha_of(("blocks.0.attn.not_to_q",), 4, "x") == 8
    assert given.alpha_of(("proj_out",), 4, "x") == 1
    assert given.alpha_of(("blocks.1.proj_out",), 6, "x") == 8
    with pytest.raises(DiffLoRAError, match=r"rank 6 for blocks\.1\.proj_out, but its tensors have rank 4"):
        given.alpha_of(("blocks.1.proj_out",), 4, "x")
    assert given.alpha_of(("blocks.0.ff",), 0, "x") == 8, "a LoKr of whole factors has no rank to compare"


@pytest.mark.parametrize(
    "metadata",
    [
        {"transformer.lora_alpha": "8", "transformer.r": "2"},
        {"lora_adapter_metadata": '{"transformer.lora_alpha": 8, "transformer.r": 2}'},
    ],
)
def test_the_header_speaks_for_one_component(metadata: dict[str, str]) -> None:
    found = from_metadata(metadata, "x")
    assert set(found) == {"transformer"} and found["transformer"].alpha == 8


def test_a_global_alpha_in_the_header_speaks_for_all() -> None:
    for name in ("alpha", "lora_alpha", "network_alpha"):
        assert from_metadata({name: "16"}, "x")[""].alpha == 16
    assert from_metadata({"ss_network_alpha": "16", "ss_network_dim": "32"}, "x") == {}


def test_values_and_patterns_of_any_length_make_short_messages() -> None:
    for config in ({"bias": "a" * 10**5}, {"use_dora": "a" * 10**5}, {"alpha_pattern": ["a" * 10**5]}):
        with pytest.raises(DiffLoRAError) as caught:
            scaling(config, "x.safetensors")
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("pattern", ["(?au)to_q", "[[a]to_q", "[a--b]", "(a+)+", "("])
def test_patterns_that_python_cannot_read_in_one_way_are_refused(pattern: str) -> None:
    with pytest.raises(DiffLoRAError, match="expected a plain regular expression"):
        scaling({"alpha_pattern": {pattern: 1}}, "x.safetensors")
