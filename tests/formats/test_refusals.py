"""What cannot be honoured is refused: the message names the file, at most four keys, what was expected, what to do."""

from collections.abc import Mapping

import pytest

from difflora.formats.errors import DiffLoRAError
from difflora.formats.match import explain

Shapes = Mapping[str, tuple[int, ...]]
Q = "transformer.transformer_blocks.0.attn.to_q"
K = "transformer.transformer_blocks.0.attn.to_k"
FLAT = "lora_unet_double_blocks_0_img_attn_proj"


def pair(module: str, rows: int = 8, cols: int = 8) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_down.weight": (2, cols), f"{module}.lora_up.weight": (rows, 2)}


def refusal(shapes: Shapes) -> str:
    with pytest.raises(DiffLoRAError) as caught:
        explain(shapes, source="x.safetensors")
    assert str(caught.value).startswith("x.safetensors")
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (f"{FLAT}.oft_diag", "old OFT"),
        (f"{Q}.vera_lambda_b", "VeRA"),
        (f"{Q}.boft_R", "PEFT IA3, BOFT or GLoRA"),
        (f"{Q}.ia3_l", "PEFT IA3, BOFT or GLoRA"),
        (f"{FLAT}.bias_values", "sparse biases"),
        ("bundle_emb.style.clip_l_out", "output embedding"),
        ("emb_params", "nameless embedding"),
        ("lora_controlnet", "ControlNet LoRA"),
        ("a.b.___.layer.lora_down.weight", "HCP-Diffusion"),
        ("a.b.___.layer.W_up", "HCP-Diffusion"),
        ("unet:0:up", "cloneofsimo"),
        ("text_encoder:3:down", "cloneofsimo"),
        ("transformer_blocks.0.mlp_fc1.lora_down", "nunchaku"),
        ("single_transformer_blocks.0.mlp_context_fc2.lora_up.weight", "nunchaku"),
    ],
)
def test_known_kinds_that_are_not_read(key: str, kind: str) -> None:
    text = refusal({**pair(FLAT), key: (4, 4)})
    assert text.startswith(f"x.safetensors holds {kind}: ")
    assert f"Keys: {key}." in text


def test_several_refused_kinds_are_all_named() -> None:
    text = refusal({f"{FLAT}.vera_lambda_b": (2, 2), f"{FLAT}.oft_diag": (8,), "lora_controlnet": ()})
    assert text.startswith("x.safetensors holds VeRA")
    assert text.endswith("It also holds old OFT, ControlNet LoRA.")


def test_at_most_four_keys_are_listed() -> None:
    text = refusal({f"lora_unet_double_blocks_{n}_img_attn_proj.oft_diag": (2, 2) for n in range(7)})
    assert text.count(".oft_diag") == 4
    assert "and 3 more" in text


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({f"{FLAT}.hada_w1_a": (8, 2), f"{FLAT}.hada_w1_b": (2, 8), f"{FLAT}.hada_w2_a": (8, 2)}, "hada_w2_b"),
        ({f"{FLAT}.lokr_w1": (2, 2)}, "lokr_w2, lokr_w2_a, lokr_w2_b"),
        ({f"{FLAT}.lokr_w1": (2, 2), f"{FLAT}.lokr_w2_a": (4, 2)}, "lokr_w2, lokr_w2_a, lokr_w2_b"),
        ({f"{FLAT}.a1.weight": (8, 2), f"{FLAT}.a2.weight": (2, 8), f"{FLAT}.b1.weight": (8, 2)}, "b2.weight"),
        ({f"{FLAT}.on_input": ()}, "weight"),
        ({f"{FLAT}.rescale": (8, 1)}, "oft_blocks"),
    ],
)
def test_incomplete_kinds_say_what_is_missing(shapes: Shapes, text: str) -> None:
    assert f"Expected {FLAT}.{text} beside it; the file is incomplete." in refusal({**pair(Q), **shapes})


@pytest.mark.parametrize(
    "shapes",
    [
        {"hada_w1_a": (8, 2), "hada_w1_b": (2, 8), "hada_w2_a": (8, 3), "hada_w2_b": (2, 8)},
        {"hada_w1_a": (8, 2), "hada_w1_b": (2, 8), "hada_w2_a": (8, 2), "hada_w2_b": (2, 7)},
        {"hada_w1_a": (2, 8), "hada_w1_b": (2, 8), "hada_w2_a": (2, 8), "hada_w2_b": (2, 8), "hada_t1": (2, 2, 3, 3)},
        {"lokr_w1": (2,), "lokr_w2": (4, 4)},
        {"lokr_w1_a": (2, 3), "lokr_w1_b": (2, 4), "lokr_w2": (4, 4)},
        {"a1.weight": (8, 2), "a2.weight": (2, 8), "b1.weight": (8, 3), "b2.weight": (2, 7)},
        {"oft_blocks": (4, 2, 3)},
        {"oft_blocks": (2, 2)},
        {"oft_R.weight": (4, 5)},
        {"oft_R.weight": (4,)},
        {"diff": ()},
        {"set_weight": (0,)},
    ],
)
def test_tensors_of_a_kind_that_do_not_fit(shapes: Shapes) -> None:
    if (0,) in shapes.values():
        assert "holds no LoRA tensors" in refusal({f"{FLAT}.{end}": shape for end, shape in shapes.items()})
    else:
        text = refusal({f"{FLAT}.{end}": shape for end, shape in shapes.items()})
        assert "do not fit together. Expected " in text


def test_a_tensor_of_another_kind_beside_the_factors() -> None:
    assert "mix loha and lora" in refusal({**pair(FLAT), f"{FLAT}.hada_w1_a": (8, 2)})
    assert f"{FLAT}.dora_scale belongs to no diff" in refusal({f"{FLAT}.diff": (8, 8), f"{FLAT}.dora_scale": (8,)})


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        pytest.param(
            {f"{Q}.lora_A.weight": (2, 8)},
            [f"{Q}.lora_A.weight stands alone", f"Expected {Q}.lora_B.weight"],
            id="up missing",
        ),
        pytest.param(
            {f"{FLAT}.lora_up.weight": (8, 2), f"{FLAT}.alpha": ()},
            [f"{FLAT}.lora_up.weight stands alone", f"Expected {FLAT}.lora_down.weight"],
            id="down missing",
        ),
        pytest.param(
            {f"{Q}.lora.down.weight": (2, 8)}, [f"Expected {Q}.lora.up.weight"], id="partner in the file's spelling"
        ),
        pytest.param(
            {**pair(FLAT), f"{Q}.alpha": ()}, [f"{Q}.alpha belongs to no factors", "incomplete"], id="alpha alone"
        ),
        pytest.param(
            {**pair(FLAT), f"{Q}.lora_mid.weight": (2, 2, 3, 3)}, [f"{Q}.lora_mid.weight belongs to no"], id="mid alone"
        ),
        pytest.param(
            {**pair(Q), f"{Q}.lora_A.weight": (2, 8)},
            [f"{Q}.lora_A.weight and {Q}.lora_down.weight are two spellings of one tensor", "Remove one"],
            id="two spellings of a tensor",
        ),
        pytest.param(
            {**pair(FLAT), **pair("diffusion_model.double_blocks.0.img_attn.proj")},
            ["both change transformer.transformer_blocks.0.attn.to_out.0", FLAT, "diffusion_model.double_blocks.0"],
            id="two spellings of a module",
        ),
        pytest.param(
            {**pair("lora_unet_double_blocks_0_img_attn_qkv", 24), **pair("lora_unet_transformer_blocks_0_attn_to_k")},
            ["both change transformer.transformer_blocks.0.attn.to_k", "Expected one spelling"],
            id="a fused module and a part of it",
        ),
        pytest.param(
            {f"{Q}.lora_A.weight": (2, 8), f"{Q}.lora_B.weight": (8, 3)},
            [f"{Q}.lora_A.weight [2, 8]", f"{Q}.lora_B.weight [8, 3]", "of one rank r"],
            id="ranks differ",
        ),
        pytest.param({f"{Q}.lora_A.weight": (0, 8), f"{Q}.lora_B.weight": (8, 0)}, ["no LoRA tensors"], id="rank 0"),
        pytest.param({f"{Q}.lora_A.weight": (8,), f"{Q}.lora_B.weight": (8, 8)}, ["do not fit"], id="vector"),
        pytest.param(
            {f"{Q}.lora_A.weight": (2, 8, 3, 3), f"{Q}.lora_B.weight": (8, 2, 3, 3)}, ["do not fit"], id="two kernels"
        ),
        pytest.param(
            {**pair(FLAT), f"{FLAT}.lora_mid.weight": (3, 2, 3, 3)}, [f"{FLAT}.lora_mid.weight [3, 2, 3, 3]"], id="mid"
        ),
        pytest.param(
            {**pair(FLAT), f"{FLAT}.alpha": (2,)}, [f"{FLAT}.alpha has shape [2]", "Expected one number"], id="alpha"
        ),
        pytest.param(
            {
                f"{Q}.lora_A.a.weight": (2, 8),
                f"{Q}.lora_B.a.weight": (8, 2),
                f"{K}.lora_A.b.weight": (2, 8),
                f"{K}.lora_B.b.weight": (8, 2),
            },
            ["several adapters in one file ('b', 'a')", f"{Q}.lora_A.a.weight", f"{K}.lora_A.b.weight"],
            id="two slots",
        ),
        pytest.param(
            {
                f"{Q}.lora_A.weight": (2, 8),
                f"{Q}.lora_B.weight": (8, 2),
                f"{K}.lora_A.b.weight": (2, 8),
                f"{K}.lora_B.b.weight": (8, 2),
            },
            ["several adapters in one file ('b', no name)", "save each adapter to a file of its own"],
            id="slot and none",
        ),
        pytest.param(
            {f"{Q}.lora_embedding_A": (2, 8), f"{Q}.lora_B.weight": (8, 2)},
            ["mix lora and lora_embedding"],
            id="embedding and linear factors",
        ),
        pytest.param(
            {**pair(FLAT), f"{FLAT}.weight": (8,)},
            [f"{FLAT}.weight: not the name of an adapter's tensor", ".lora_A.weight"],
            id="IA3's weight without on_input",
        ),
        pytest.param({**pair(FLAT), "step": ()}, ["step: not the name"], id="unknown tensor"),
        pytest.param({}, ["holds no LoRA tensors"], id="empty"),
        pytest.param({"_aux.x": ()}, ["holds no LoRA tensors"], id="bookkeeping only"),
        pytest.param(
            {**pair(FLAT), **pair("lora_unet_double_blocks_0_img_attn_gate")},
            [
                "flux comes closest",
                "lacks 1 of its 2 modules, then flux2, which lacks 1: lora_unet_double_blocks_0_img_attn_gate",
            ],
            id="a module that no family has",
        ),
        pytest.param(
            {**pair(FLAT), **pair(f"{FLAT[:-4]}qkv", 24), **pair("lora_te4_text_model_encoder_layers_0_mlp_fc1")},
            ["flux comes closest and lacks 1 of its 3 modules", ": lora_te4_text_model"],
            id="an encoder that the family has not",
        ),
        pytest.param(
            pair("lora_unet_foo_bar"), ["no known family has any of its modules: lora_unet_foo_bar"], id="alien"
        ),
        pytest.param(pair("base_model.model.foo.bar"), ["no known family has any"], id="alien without component"),
    ],
)
def test_fails_closed(shapes: Shapes, parts: list[str]) -> None:
    text = refusal(shapes)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("stem", "rows", "said"),
    [
        ("lora_unet_double_blocks_0_img_attn_qkv", 25, "makes 25 rows, which are not D + D + D with D = 8"),
        ("transformer.single_blocks.0.linear1", 24, "makes 24 rows, which are not D + D + D + M with D = 8"),
    ],
)
def test_rows_that_are_not_those_of_the_parts_are_said(stem: str, rows: int, said: str) -> None:
    found = explain(pair(stem, rows), family="flux")
    assert [f"{stem}.lora_down.weight {said}"] == list(found.uneven)
    assert {entry.rows for entry in found.entries} == {()}
