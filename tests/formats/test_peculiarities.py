"""What single families have and no other: rows in another order, adapters of their own, cut names."""

import pytest

from difflora.formats.kinds import Shape
from difflora.formats.match import explain


@pytest.mark.parametrize(("key", "rows"), [("lora_A", 128), ("lora_A.default", 384)])
def test_minimax_h3_files_with_a_name_of_the_adapter_have_their_heads_in_turn(key: str, rows: int) -> None:
    module = "blocks.0.attn.qkv_proj"
    found = explain({f"{module}.{key}.weight": (4, 5376), f"{module}.{key.replace('A', 'B')}.weight": (21504, 4)})
    assert found.family == "minimax-h3"
    spans = {entry.path[-4:]: entry.rows for entry in found.entries}
    if rows == 128:
        assert spans == {"to_q": ((0, 7168),), "to_k": ((7168, 14336),), "to_v": ((14336, 21504),)}
    else:
        for n, name in enumerate(("to_q", "to_k", "to_v")):
            assert spans[name] == tuple((at, at + 128) for at in range(128 * n, 21504, rows))


def test_the_last_block_of_sd3_is_modulated_in_another_order() -> None:
    module = "lora_unet_joint_blocks_{}_context_block_adaLN_modulation_1"
    keys = {
        f"{module.format(layer)}.{end}": shape
        for layer, rows in ((22, 6 * 1536), (23, 2 * 1536))
        for end, shape in (("lora_down.weight", (4, 1536)), ("lora_up.weight", (rows, 4)))
    }
    found = explain(keys)
    assert found.family == "sd3"
    assert {entry.path: entry.rows for entry in found.entries} == {
        "transformer_blocks.22.norm1_context.linear": (),
        "transformer_blocks.23.norm1_context.linear": ((1536, 3072), (0, 1536)),
    }


def test_anima_keeps_its_adapter_in_a_component_of_its_own() -> None:
    pair = {"lora_A.weight": (4, 1024), "lora_B.weight": (1024, 4)}
    block = {"lora_A.weight": (4, 2048), "lora_B.weight": (2048, 4)}
    keys = {f"diffusion_model.llm_adapter.blocks.0.self_attn.q_proj.{end}": shape for end, shape in pair.items()}
    keys |= {f"diffusion_model.blocks.0.self_attn.q_proj.{end}": shape for end, shape in block.items()}
    found = explain(keys)
    assert found.family == "anima"
    assert [(entry.component, entry.path) for entry in found.entries] == [
        ("text_conditioner", "blocks.0.self_attn.q_proj"),
        ("transformer", "transformer_blocks.0.attn1.to_q"),
    ]


def test_krea2_queries_keys_and_values_in_one_module_beside_empty_placeholders() -> None:
    module = "transformer.transformer_blocks.0.attn"
    keys: dict[str, Shape] = {f"{module}.to_qkv.lora_A.weight": (2, 6144), f"{module}.to_qkv.lora_B.weight": (9216, 2)}
    empty: dict[str, Shape] = {f"{module}.to_{name}.lora_{end}.weight": (0,) for name in "qkv" for end in "AB"}
    found = explain(keys | empty)
    assert found.family == "krea2"
    assert {entry.path[-4:]: entry.rows for entry in found.entries} == {
        "to_q": ((0, 6144),),
        "to_k": ((6144, 7680),),
        "to_v": ((7680, 9216),),
    }


def test_flux2_blocks_whose_name_was_cut() -> None:
    module = "diffusion_model.sformer_blocks.3.attn.to_q"
    found = explain({f"{module}.lora_A.weight": (4, 6144), f"{module}.lora_B.weight": (6144, 4)})
    assert (found.family, found.entries[0].path) == ("flux2", "transformer_blocks.3.attn.to_q")
