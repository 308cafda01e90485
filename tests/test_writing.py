"""What is written is read back as it was, and by diffusers and PEFT as we mean it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
import torch
from diffusers import FluxPipeline, StableDiffusionXLPipeline
from torch import Tensor

from difflora import attach, compose, load
from difflora.deltas import Cut, Dense, LowRank
from difflora.formats.errors import DiffLoRAError
from difflora.formats.families import FAMILIES
from difflora.formats.naming import home, natives
from difflora.formats.rules import outline, sections
from difflora.functions import IA3, DoRA, GLoRA, Replacement
from difflora.products import Hadamard, Kronecker
from difflora.rotations import InputRotation, OutputRotation
from difflora.types import Adapter, Vectors
from difflora.writing import save, state_dict

LAYOUTS = ("diffusers", "kohya", "comfy", "peft")
D, Q = 32, "transformer_blocks.0.attn.to_q"
NAMES = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
KEYS = Path(__file__).parent / "formats" / "keys"


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def pair(out: int = D, rank: int = 4, alpha: Any = None, seed: int = 0, columns: int = D) -> LowRank:
    return LowRank(rand(rank, columns, seed=seed), rand(out, rank, seed=seed + 1), alpha=alpha)


def adapter(
    deltas: Mapping[str, Any], family: str | None = "flux", component: str = "transformer", **more: Any
) -> Adapter:
    return Adapter("x", "x", "diffusers", family, {component: dict(deltas)}, **more)


def saved(one: Adapter, folder: Path, layout: str, **more: Any) -> Adapter:
    """The adapter after a round through a file."""
    path = save(one, folder / ("x" if layout == "peft" else f"{layout}.safetensors"), layout, force=True, **more)  # type: ignore[arg-type]
    return load(path, family=one.family)


def change(delta: Any) -> Tensor:
    """The dense change; of the same made-up base where it is a function of one."""
    shape = [size or D for size in (delta.whole.shape if isinstance(delta, Cut) else delta.shape)]
    return delta.dense(rand(*shape, seed=9) if delta.needs_base else None).flatten()


def assert_same(one: Adapter, two: Adapter, bits: bool = True) -> None:
    assert {c: set(m) for c, m in one.components.items()} == {c: set(m) for c, m in two.components.items()}
    for component, deltas in one.components.items():
        for path, delta in deltas.items():
            have, want = change(two.components[component][path]), change(delta)
            assert torch.equal(have, want) if bits else torch.allclose(have, want, rtol=1e-5, atol=1e-6), path


def listing(name: str, dtype: torch.dtype, alpha: Tensor) -> dict[str, Tensor]:
    """A state dict with the keys and shapes of a real file."""
    shapes = json.loads((KEYS / f"{name}.json").read_text())["keys"]
    return {
        key: alpha.reshape(shape) if key.endswith("alpha") else rand(*shape, seed=i).to(dtype)
        for i, (key, shape) in enumerate(shapes.items())
    }


# --- round trips


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", [None, 3.0, torch.tensor(3.0), torch.tensor([2], dtype=torch.int64), 0.3])
def test_pairs_come_back_bit_for_bit(layout: str, alpha: Any, tmp_path: Path) -> None:
    one = adapter({"transformer_blocks.0.ff.net.0.proj": pair(96, 4, alpha), "proj_out": pair(8, 2, alpha, seed=3)})
    two = saved(one, tmp_path, layout)
    assert_same(one, two)
    for path, delta in one.components["transformer"].items():
        read = two.components["transformer"][path]
        assert isinstance(read, LowRank) and torch.equal(read.down, delta.down) and torch.equal(read.up, delta.up)
        assert read.scale == delta.scale and read.rank == delta.rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_alphas_are_each_module_s_own(layout: str, tmp_path: Path) -> None:
    deltas = {
        f"transformer_blocks.{i}.ff.net.2": pair(D, 2 + i % 3, alpha=[1.0, 2.5, 7.0, None][i % 4]) for i in range(9)
    }
    one = adapter({**deltas, "proj_out": pair(8, 7), "single_transformer_blocks.0.proj_out": pair(D, 3, 5.0)})
    assert_same(one, saved(one, tmp_path, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rslora_keeps_its_scale(layout: str, tmp_path: Path) -> None:
    deltas = {f"transformer_blocks.{i}.ff.net.2": replace(pair(D, 3 + i, 6.0), rslora=True) for i in range(2)}
    one = adapter(deltas)
    assert_same(one, saved(one, tmp_path, layout), bits=layout in ("diffusers", "peft"))
    mixed = adapter({**deltas, "proj_out": pair(8, 2, 3.0)})
    assert_same(mixed, saved(mixed, tmp_path, layout), bits=False)


KINDS: dict[str, Callable[[], Any]] = {
    "loha": lambda: Hadamard(rand(D, 2), rand(2, D, seed=1), rand(D, 2, seed=2), rand(2, D, seed=3), alpha=1.5),
    "lokr": lambda: Kronecker(w1=rand(4, 4), w2_a=rand(8, 2), w2_b=rand(2, 8), alpha=torch.tensor(3.0)),
    "lokr whole": lambda: Kronecker(w1=rand(4, 4), w2=rand(8, 8, seed=2), alpha=torch.tensor(7.0)),
    "lokr of a config": lambda: Kronecker(w1=rand(4, 4), w2_a=rand(8, 2), w2_b=rand(2, 8), alpha=3.0, r=4),
    "whole lokr of a config": lambda: Kronecker(w1=rand(4, 4), w2=rand(8, 8, seed=2), alpha=3.0, r=2),
    "dora": lambda: DoRA(pair(alpha=2.0), rand(D).abs()),
    "dora by column": lambda: DoRA(pair(alpha=2.0), rand(1, D).abs(), by_input=True),
    "dora on lokr": lambda: DoRA(Kronecker(w1=rand(4, 4), w2=rand(8, 8)), rand(D, 1).abs()),
    "tucker": lambda: LowRank(rand(2, D, 1, 1), rand(D, 2, 1, 1), rand(2, 2, 3, 3), alpha=torch.tensor(1.0)),
    "dylora": lambda: LowRank(rand(2, D, 3, 3), rand(D, 2), alpha=1.0),
    "negative alpha": lambda: pair(alpha=-2.0),
    "glora": lambda: GLoRA(rand(D, 2), rand(2, D), rand(D, 2, seed=4), rand(2, D, seed=4), alpha=1.0),
    "old glora": lambda: GLoRA(rand(2, D), rand(D, 2), rand(2, D, seed=4), rand(D, 2, seed=4), alpha=1.0),
    "ia3": lambda: IA3(rand(1, D), torch.tensor(True)),
    "diff": lambda: Dense(rand(D, D)),
    "set": lambda: Replacement(rand(D, D)),
    "oft": lambda: OutputRotation(rand(4, 8, 8), alpha=torch.tensor(0.01)),
    "boft": lambda: OutputRotation(rand(2, 4, 8, 8), rescale=rand(D, 1)),
    "oft_v2": lambda: InputRotation(rand(4, 28) / 9, scaled=torch.tensor(True), magnitude=rand(D).abs()),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back(kind: str, layout: str, tmp_path: Path) -> None:
    one = adapter({"transformer_blocks.0.ff.net.2": KINDS[kind](), "transformer_blocks.1.ff.net.2": pair(D, 2, 4.0)})
    two = saved(one, tmp_path, layout)
    assert_same(one, two, bits="config" not in kind)
    assert two.components["transformer"]["transformer_blocks.0.ff.net.2"].kind == KINDS[kind]().kind


@pytest.mark.parametrize("kind", ["glora", "old glora"])
def test_glora_is_written_in_today_s_order(kind: str) -> None:
    tensors, _ = state_dict(adapter({"proj_out": KINDS[kind]()}), "kohya")
    shapes = {key.split(".", 1)[1]: tuple(value.shape) for key, value in tensors.items()}
    assert shapes == {"a1.weight": (D, 2), "a2.weight": (2, D), "b1.weight": (D, 2), "b2.weight": (2, D), "alpha": ()}


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
def test_biases_norms_and_bare_parameters_come_back(layout: str, tmp_path: Path) -> None:
    deltas = {
        "blocks.0.norm2": Dense(rand(D)), "blocks.0.norm2.bias": Dense(rand(D, seed=1)),
        "blocks.0.scale_shift_table": Dense(rand(1, 6, D)), "blocks.0.ffn.net.2": pair(D, 4, 2.0),
        "blocks.1.ffn.net.2": pair(D, 4, 2.0),
        "blocks.0.ffn.net.2.bias": Dense(rand(D, seed=2), alpha=2.0, rank=4),
        "blocks.1.attn1.to_q.bias": Dense(rand(D, seed=3)),
    }  # fmt: skip
    one = adapter(deltas, "wan")
    assert_same(one, saved(one, tmp_path, layout))
    keys = state_dict(one, layout)[0].keys()  # type: ignore[arg-type]
    wanted = {
        "kohya": (
            "lora_unet_blocks_0_norm3.w_norm",
            "lora_unet_blocks_0_norm3.b_norm",
            "lora_unet_blocks_0_ffn_2.diff_b",
        ),
        "comfy": ("diffusion_model.blocks.0.norm3.diff", "diffusion_model.blocks.0.modulation.diff"),
        "diffusers": ("transformer.blocks.0.norm2.diff_b", "transformer.blocks.0.ffn.net.2.diff_b"),
    }
    assert set(wanted[layout]) <= keys


def test_a_bias_beside_every_pair_is_peft_s(tmp_path: Path) -> None:
    deltas = {f"transformer_blocks.{i}.ff.net.2": pair(D, 4, 2.0) for i in range(2)}
    biases = {f"{path}.bias": Dense(rand(D, seed=i), alpha=2.0, rank=4) for i, path in enumerate(deltas)}
    one = adapter({**deltas, **biases})
    tensors, metadata = state_dict(one)
    assert "transformer.transformer_blocks.0.ff.net.2.lora_B.bias" in tensors
    assert json.loads(metadata["lora_adapter_metadata"])["transformer.lora_bias"] is True
    assert_same(one, saved(one, tmp_path, "diffusers"))
    assert_same(one, saved(one, tmp_path, "peft"))


LYCORIS = ("locon", "locon_tucker", "loha", "lokr", "full", "norm_locon", "dora_out")
LISTINGS = (
    *("flux_kohya_sdscripts_doc", "krea2_lora_kohya_format", "anima_lora_kohya_format"),
    *(f"generated/lycoris_sd_{kind}" for kind in LYCORIS),
)


@pytest.mark.parametrize("alpha", [torch.tensor(3.0), torch.tensor([2.0], dtype=torch.float16)], ids=["f32", "f16[1]"])
@pytest.mark.parametrize("name", LISTINGS)
def test_kohya_through_diffusers_is_the_same_file(name: str, alpha: Tensor, tmp_path: Path) -> None:
    first = listing(name, torch.bfloat16, alpha)
    if alpha.shape:
        first = {key: value.reshape(1) if key.endswith("alpha") else value for key, value in first.items()}
    family = "sd1" if "lycoris" in name else None
    one = load(first, family=family)
    two = load(save(one, tmp_path / "x.safetensors"), family=one.family)
    last, metadata = state_dict(two, "kohya")
    assert last.keys() == first.keys()
    assert all(last[key].dtype == first[key].dtype and torch.equal(last[key], first[key]) for key in first)
    assert metadata.items() - {("difflora.family", one.family)} == {("format", "pt")}


def test_alphas_are_text_in_the_diffusers_layout() -> None:
    deltas = {f"transformer_blocks.{i}.ff.net.2": pair(D, 4, torch.tensor(2.0)) for i in range(3)}
    one = adapter({**deltas, "proj_out": pair(8, 3, torch.tensor(1.5))})
    tensors, metadata = state_dict(one)
    config = json.loads(metadata["lora_adapter_metadata"])
    assert not [key for key in tensors if "alpha" in key]
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (4, 2)
    assert config["transformer.rank_pattern"] == {"^proj_out": 3}
    assert config["transformer.alpha_pattern"] == {"^proj_out": 1.5}
    assert (
        json.loads(state_dict(adapter({"proj_out": pair(8, 3)}))[1]["lora_adapter_metadata"])["transformer.lora_alpha"]
        == 3
    )


# --- names, and modules that are one


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_native_names_of_a_family_are_read_as_what_they_were_written_for(family: Any) -> None:
    ambiguous = {"hunyuan-dit": ("norm2", "norm3")}.get(family.name, ())
    for layout in ("kohya", "comfy"):
        found = home(family, family.denoiser, layout)
        assert found is not None
        network = family.network
        patterns = dict.fromkeys((*network.names, *sections(network.rules)))
        paths = [p.replace("{i}", "3").replace("{j}", "2").replace("{k}", "1") for p in patterns]
        for one in natives(found[1], [path for path in paths if not path.endswith(ambiguous or ("?",))]):
            name = one.name.replace(".", "_") if layout == "kohya" else one.name
            assert set(network.find(*outline(name), layout == "kohya")) == {one.sections}, one.name


@pytest.mark.parametrize(
    ("family", "component", "path", "kohya", "comfy"),
    [
        ("sdxl", "text_encoder_2", "text_model.final_layer_norm", "lora_te2_text_model_final_layer_norm", "clip_g"),
        ("sd1", "text_encoder", "text_model.final_layer_norm", "lora_te_text_model_final_layer_norm", "clip_l"),
        ("flux", "text_encoder_2", "encoder.final_layer_norm", "lora_te3_encoder_final_layer_norm", "t5xxl"),
        ("sd3", "text_encoder", "text_model.final_layer_norm", "lora_te1_text_model_final_layer_norm", "clip_l"),
        (
            "cascade",
            "text_encoder",
            "text_model.final_layer_norm",
            "lora_prior_te_text_model_final_layer_norm",
            "clip_g",
        ),
    ],
)
def test_text_encoders_have_the_names_that_others_give_them(
    family: str, component: str, path: str, kohya: str, comfy: str
) -> None:
    one = adapter({path: Dense(rand(8))}, family, component)
    assert [*state_dict(one, "kohya")[0]] == [f"{kohya}.w_norm"]
    assert [*state_dict(one, "comfy")[0]] == [f"text_encoders.{comfy}.transformer.{path}.diff"]


def linear1(rows: int = 3 * D + 4 * D) -> tuple[LowRank, dict[str, LowRank]]:
    """A fused pair, and the parts that a loader makes of it."""
    whole = LowRank(rand(4, D), rand(rows, 4), alpha=torch.tensor(2.0))
    edges = [(0, D), (D, 2 * D), (2 * D, 3 * D), (3 * D, rows)]
    return whole, {f"single_transformer_blocks.0.{n}": whole.rows([e]) for n, e in zip(NAMES, edges, strict=True)}


def test_parts_of_one_pair_are_that_pair_again() -> None:
    whole, parts = linear1()
    tensors, _ = state_dict(adapter(parts), "kohya")
    stem = "lora_unet_single_blocks_0_linear1"
    assert tensors.keys() == {f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"}
    assert torch.equal(tensors[f"{stem}.lora_up.weight"], whole.up)
    assert torch.equal(tensors[f"{stem}.lora_down.weight"], whole.down) and tensors[f"{stem}.alpha"] == 2.0


def test_swapped_halves_are_swapped_back(tmp_path: Path) -> None:
    first = {"lora_unet_final_layer_adaLN_modulation_1.lora_down.weight": rand(2, D)}
    first["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"] = rand(2 * D, 2)
    one = load(first, family="flux")
    assert torch.equal(change(one.components["transformer"]["norm_out.linear"]).reshape(2 * D, D)[:D],
                       (first[next(reversed(first))][D:] @ next(iter(first.values()))))  # fmt: skip
    last, _ = state_dict(load(save(one, tmp_path / "x.safetensors"), family="flux"), "kohya")
    assert all(torch.equal(last[key], value) for key, value in first.items())


def test_parts_trained_apart_are_blocks_of_a_higher_rank_at_their_scales(tmp_path: Path) -> None:
    parts = {f"transformer_blocks.0.attn.to_{c}": pair(D, 3, 1.0, seed=i) for i, c in enumerate("qkv")}
    tensors, _ = state_dict(adapter(parts), "kohya")
    up = tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"]
    assert tensors["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 3.0  # 3 x 1
    assert up.shape == (3 * D, 9) and torch.equal(up[D : 2 * D, 3:6], parts["transformer_blocks.0.attn.to_k"].up)
    assert not up[:D, 3:].any() and not up[D : 2 * D, :3].any() and not up[2 * D :, :6].any()
    assert_same(adapter(parts), saved(adapter(parts), tmp_path, "kohya"), bits=False)
    uneven = {**parts, "transformer_blocks.0.attn.to_v": pair(D, 2, 4.0)}
    assert_same(adapter(uneven), saved(adapter(uneven), tmp_path, "comfy"), bits=False)


@pytest.mark.parametrize(
    "kinds", [("loha", "loha"), ("lokr", "loha"), ("diff", "lokr"), ("dora", "dora"), ("lora", "diff")]
)
def test_other_kinds_trained_apart_are_joined_exactly(kinds: tuple[str, str], tmp_path: Path) -> None:
    made = {"lora": lambda: pair(D, 3, 1.0), **KINDS}
    q, k = made[kinds[0]](), made[kinds[1]]()
    q = replace(q, alpha=0.5) if kinds[0] == "loha" else q
    third = replace(made[kinds[0]](), magnitude=rand(D, seed=5)) if kinds[0] == "dora" else made[kinds[1]]()
    one = adapter(dict(zip((f"transformer_blocks.0.attn.to_{c}" for c in "qkv"), (q, k, third), strict=True)))
    assert_same(one, saved(one, tmp_path, "kohya"), bits=False)


CUTS: dict[str, Callable[[], Any]] = {
    "loha": lambda: Hadamard(rand(3 * D, 2), rand(2, D), rand(3 * D, 2, seed=2), rand(2, D, seed=3), alpha=1.5),
    "lokr": lambda: Kronecker(w1=rand(12, 4), w2=rand(8, 8, seed=2)),
    "lokr off the blocks": lambda: Kronecker(w1=rand(2, 4), w2=rand(48, 8, seed=2)),
    "dora": lambda: DoRA(pair(3 * D, alpha=2.0), rand(3 * D).abs()),
    "dora by column": lambda: DoRA(pair(3 * D, alpha=2.0), rand(1, D).abs(), by_input=True),
    "diff": lambda: Dense(rand(3 * D, D)),
    "glora": lambda: GLoRA(rand(D, 2), rand(2, D), rand(3 * D, 2, seed=4), rand(2, D, seed=4), alpha=1.0),
    "ia3": lambda: IA3(rand(3 * D), torch.tensor(False)),
    "ia3 of columns": lambda: IA3(rand(D), torch.tensor(True)),
    "oft": lambda: OutputRotation(rand(12, 8, 8), rescale=rand(3 * D, 1)),
    "boft": lambda: OutputRotation(rand(2, 12, 8, 8)),
    "oft_v2": lambda: InputRotation(rand(4, 28) / 9),
    "set": lambda: Replacement(rand(3 * D, D)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CUTS)
def test_what_was_cut_is_whole_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole = CUTS[kind]()
    names = [f"transformer_blocks.0.attn.to_{c}" for c in "qkv"]
    parts = {name: whole.rows([(i * D, (i + 1) * D)]) for i, name in enumerate(names)}
    one = adapter(parts)
    assert len({key.split(".")[0] for key in state_dict(one, "kohya")[0]}) == 1
    two = saved(one, tmp_path, "comfy")
    shape = [size or n for size, n in zip(whole.shape, (3 * D, D), strict=True)]
    for name in names:
        have, want = two.components["transformer"][name], parts[name]
        base = rand(*shape, seed=9)
        rows = {name: base if getattr(d, "joined", False) else base[:D] for name, d in (("a", have), ("b", want))}
        assert torch.equal(have.dense(rows["a"]), want.dense(rows["b"]))


def test_missing_parts_are_zero_rows_where_their_number_is_known(tmp_path: Path) -> None:
    _, parts = linear1()
    some = {path: delta for path, delta in parts.items() if "to_k" not in path}
    two = saved(adapter(some), tmp_path, "kohya")
    assert not change(two.components["transformer"]["single_transformer_blocks.0.attn.to_k"]).any()
    for path, delta in some.items():
        assert torch.equal(change(two.components["transformer"][path]), change(delta))


def test_a_missing_part_of_unknown_size_is_refused_unless_another_block_or_the_published_width_tells() -> None:
    _, parts = linear1()
    some = {path: delta for path, delta in parts.items() if "proj_mlp" not in path}
    with pytest.raises(DiffLoRAError, match=r"single_transformer_blocks\.0\.proj_mlp there"):
        state_dict(adapter(some), "kohya")
    other = {"single_transformer_blocks.1.proj_mlp": pair(4 * D), **{
        path.replace("blocks.0", "blocks.1"): delta for path, delta in some.items()}}  # fmt: skip
    up = state_dict(adapter({**some, **other}), "kohya")[0]["lora_unet_single_blocks_0_linear1.lora_up.weight"]
    assert up.shape[0] == 7 * D and not up[3 * D :].any()
    narrow = {"single_transformer_blocks.1.proj_mlp": pair(4 * D, columns=D + 1)}
    with pytest.raises(DiffLoRAError, match="number of rows is not known"):
        state_dict(adapter({**some, **narrow}), "kohya")
    lone = {"single_transformer_blocks.0.proj_mlp": pair(4 * D)}
    up = state_dict(adapter(lone), "kohya")[0]["lora_unet_single_blocks_0_linear1.lora_up.weight"]
    assert up.shape[0] == 7 * D and not up[: 3 * D].any()  # q, k and v are as high as their input is wide
    wide = {f"single_transformer_blocks.0.{name}": pair(3072, 1, columns=3072) for name in NAMES[:3]}
    up = state_dict(adapter(wide), "kohya")[0]["lora_unet_single_blocks_0_linear1.lora_up.weight"]
    assert up.shape[0] == 3 * 3072 + 12288


# --- refusals


@pytest.mark.parametrize(
    ("one", "layout", "words"),
    [
        (adapter({Q: pair()}), "sd", "layout='sd'"),
        (adapter({Q: pair()}, family=None), "kohya", "no known family"),
        (adapter({Q: pair()}, family="flux|qwen-image"), "comfy", "flux, qwen-image, whose comfy names differ"),
        (adapter({"blocks.0.attn1.to_q": pair()}, "wan", "transformer_2"), "kohya", "no word for transformer_2"),
        (adapter({Q: KINDS["diff"](), "proj_out": pair()}), "peft", "cannot hold diff beside LoRA: transformer." + Q),
        (adapter({Q: KINDS["ia3"]()}), "peft", "cannot hold ia3"),
        (adapter({Q: KINDS["dora"](), "proj_out": pair()}), "peft", r"cannot hold dora\+lora"),
        (adapter({f"{Q}.bias": Replacement(rand(D))}), "diffusers", "no layout has a word for the replaced bias"),
        (adapter({}), "diffusers", "nothing to save"),
        (adapter({Q: CUTS["dora by column"]().rows([(0, D)])}), "diffusers", r"rows of a dora\+lora"),
        (adapter({Q: CUTS["dora by column"]().rows([(0, D)])}), "kohya", "cannot be one"),
        (adapter({Q: KINDS["dora"]()}), "kohya", "cannot be one"),
        (adapter({"transformer_blocks.0.attn.to_q": pair(D + 1), "transformer_blocks.0.attn.to_k": pair(),
                  "transformer_blocks.0.attn.to_v": pair()}), "kohya", r"33 \+ 32 \+ 32 rows"),
        (adapter({"nothing.known": pair()}), "kohya", "nothing"),
        (adapter({"model.language_model.layers.0.mlp.up_proj": pair()}, "flux2", "text_encoder"), "kohya",
         "no name of its own for text_encoder.model.language_model"),
        (adapter({Q: pair()}, uneven=("this is uneven",)), "diffusers", "this is uneven"),
        (adapter({Q: pair()}, vectors=(Vectors("zz", "text_encoder", rand(1, 8)),)), "peft", "words"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_hold_is_refused_by_name(one: Adapter, layout: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DiffLoRAError, match=words):
        save(one, tmp_path / ("x" if layout == "peft" else "x.safetensors"), layout)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_meta_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffLoRAError, match=f"transformer.{Q} has no values"):
        save(adapter({Q: LowRank(rand(2, D).to("meta"), rand(D, 2).to("meta"))}), tmp_path / "x.safetensors")


def test_files_are_overwritten_only_by_force_and_only_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(DiffLoRAError, match="exists"):
        save(adapter({Q: pair()}), file)
    monkeypatch.setattr(
        "difflora.writing.write",
        lambda path, *_: path.write_bytes(b"half") and (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(DiffLoRAError, match="full"):
        save(adapter({Q: pair()}), file, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"] and file.read_bytes() == b"mine"
    monkeypatch.undo()
    assert load(save(adapter({Q: pair()}), file, force=True), family="flux").components
    with pytest.raises(DiffLoRAError, match=r"suffix '.bin'"):
        save(adapter({Q: pair()}), tmp_path / "x.bin")
    with pytest.raises(DiffLoRAError, match="no folder"):
        save(adapter({Q: pair()}), tmp_path / "none" / "x.safetensors")


def test_a_folder_keeps_the_files_that_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "README.md").write_text("mine")
    save(adapter({Q: pair()}), tmp_path / "x", "peft", force=True)
    assert {path.name for path in (tmp_path / "x").iterdir()} == {
        "README.md", "adapter_model.safetensors", "adapter_config.json"}  # fmt: skip


# --- the container, metadata and hashes


def parsed(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def test_the_file_is_byte_for_byte_the_library_s(tmp_path: Path) -> None:
    one = adapter(
        {Q: pair(alpha=0.3), "proj_out": LowRank(rand(2, D).half(), rand(8, 2).bfloat16(), alpha=1.0)}, "qwen-image"
    )
    path = save(one, tmp_path / "x.safetensors", "comfy", metadata={"format": 'é "x"\n'})
    header, data = parsed(path)
    metadata = header.pop("__metadata__")
    theirs = safetensors.torch.save(safetensors.torch.load_file(path), metadata)
    assert path.read_bytes() == theirs or len(metadata) > 1  # the library orders several metadata as it likes
    assert len(path.read_bytes()) == len(theirs) and theirs.endswith(data)
    assert max(value["data_offsets"][1] for value in header.values()) == len(data)
    assert metadata["format"] == 'é "x"\n'


def test_metadata_are_kept_but_for_what_is_no_longer_so() -> None:
    metadata = {"ss_tag_frequency": "{}", "transformer.lora_alpha": "9", "lora_adapter_metadata": "old", "format": "pt"}
    one = adapter({"proj_out": pair()}, metadata=metadata)
    assert state_dict(one, "kohya")[1] == {"format": "pt", "ss_tag_frequency": "{}", "difflora.family": "flux"}
    assert "old" not in state_dict(one)[1]["lora_adapter_metadata"]


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "peft"])
def test_hashes_in_the_metadata_are_those_of_the_tensors_written(layout: str, tmp_path: Path) -> None:
    metadata = {"sshs_model_hash": "old", "sshs_legacy_hash": "old", "modelspec.hash_sha256": "0xold", "ss_dim": "1"}
    deltas = {f"transformer_blocks.{i}.ff.net.2": pair(256, 8, columns=4096, seed=i) for i in range(9)}
    path = save(adapter(deltas, metadata=metadata), tmp_path / ("x" if layout == "peft" else "x.safetensors"), layout)  # type: ignore[arg-type]
    path = path / "adapter_model.safetensors" if layout == "peft" else path
    header, data = parsed(path)
    # What sd-scripts does: save with the ss_ fields alone, then hash.
    trained = safetensors.torch.save(safetensors.torch.load_file(path), {"ss_dim": "1"})
    (length,) = struct.unpack("<Q", trained[:8])
    assert header["__metadata__"]["sshs_model_hash"] == sha256(trained[8 + length :]).hexdigest()
    assert (
        header["__metadata__"]["sshs_legacy_hash"] == sha256(trained[0x100000:0x110000]).hexdigest()[:8] != "e3b0c442"
    )
    assert header["__metadata__"]["modelspec.hash_sha256"] == f"0x{sha256(data).hexdigest()}"


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize(
    ("family", "component"), [("sd1", "text_encoder"), ("sdxl", "text_encoder_2"), ("flux", "text_encoder_2")]
)
def test_words_that_a_file_brings_along_come_back(family: str, component: str, layout: str, tmp_path: Path) -> None:
    path = "proj_out" if family == "flux" else "mid_block.resnets.0.conv1"
    place = "transformer" if family == "flux" else "unet"
    one = adapter({path: pair()}, family, place, vectors=(Vectors("zz", component, rand(2, 8)),))
    (vectors,) = saved(one, tmp_path, layout).vectors
    assert (vectors.token, vectors.component) == ("zz", component) and torch.equal(vectors.tensor, rand(2, 8))


def test_a_sum_is_saved_as_what_it_is(tmp_path: Path) -> None:
    one, two = (
        adapter({Q: pair(alpha=2.0), "proj_out": pair(8)}),
        adapter({Q: pair(seed=5), "proj_out": Dense(rand(8, D))}),
    )
    total = compose([(one, 0.7), (two, -0.3)])
    assert_same(total, saved(total, tmp_path, "diffusers"))


# --- diffusers


FLUX = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2", "single_transformer_blocks.1.proj_mlp",
        "proj_out", "single_transformer_blocks.0.proj_out"]  # fmt: skip
UNET = ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "mid_block.attentions.0.proj_in",
        "up_blocks.0.resnets.1.conv1", "conv_in"]  # fmt: skip
TEXT = [f"text_model.encoder.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.fc1")]


def fitting(model: torch.nn.Module, paths: list[str], seed: int, decomposed: bool = False) -> dict[str, Any]:
    """Pairs of several ranks and alphas for modules of a model."""
    found: dict[str, Any] = {}
    for i, path in enumerate(paths):
        modules = dict(model.named_modules())
        weight = modules.get(path, modules.get(path.removeprefix("text_model."))).weight  # type: ignore[union-attr]
        rank, kernel = 2 + i % 3, weight.shape[2:]
        found[path] = LowRank(
            rand(rank, *weight.shape[1:], seed=seed + i) * 0.4,
            rand(weight.shape[0], rank, *(1 for _ in kernel), seed=seed + 50 + i) * 0.4,
            alpha=[1.0, 2.5, None][i % 3],
        )
        if decomposed:
            norm = weight.detach().flatten(1).norm(dim=1)
            found[path] = DoRA(found[path], norm * (1 + 0.2 * rand(norm.shape[0], seed=i)))
    return found


@pytest.mark.parametrize("decomposed", [False, True])
def test_diffusers_flux_draws_what_we_draw(decomposed: bool, flux: FluxPipeline, tmp_path: Path) -> None:
    one = Adapter("x", "x", "kohya", "flux", {
        "transformer": fitting(flux.transformer, FLUX, 0, decomposed),
        "text_encoder": fitting(flux.text_encoder, TEXT, 100, decomposed)})  # fmt: skip
    _agree(flux, tiny.flux_pipeline(), one, tmp_path)


def test_diffusers_sdxl_draws_what_we_draw(sdxl: StableDiffusionXLPipeline, tmp_path: Path) -> None:
    one = Adapter("x", "x", "kohya", "sdxl", {
        "unet": fitting(sdxl.unet, UNET, 0), "text_encoder": fitting(sdxl.text_encoder, TEXT, 100),
        "text_encoder_2": fitting(sdxl.text_encoder_2, TEXT[1:], 200)})  # fmt: skip
    _agree(sdxl, tiny.sdxl_pipeline(), one, tmp_path)


def _agree(ours: Any, theirs: Any, one: Adapter, folder: Path) -> None:
    path = save(one, folder / "x.safetensors")
    base = tiny.run(ours)
    theirs.load_lora_weights(str(path), adapter_name="x")
    attach(ours).load_lora(str(path), name="x")
    have, want = tiny.run(theirs), tiny.run(ours)
    assert (want - base).abs().max() > 0.05
    assert torch.allclose(have, want, rtol=1e-3, atol=2e-4), (have - want).abs().max()
