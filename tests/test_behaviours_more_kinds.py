"""Kinds that are functions of the base, words, widened inputs and values that are no numbers (rows 48-51)."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from behaving import attached, check, held, linear, pair, positive, product, rand, restored, unchanged
from diffusers import FluxControlPipeline
from torch import Tensor, nn

import difflora
from difflora import DiffLoRAError

LIN = "transformer.blocks.0.lin"
Files = dict[str, Tensor]

# ---- functions of the base ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_input", [0, 1])
def test_row_48_ia3_scales_rows_or_columns(on_input: int) -> None:
    """Told by `on_input`, applied as what it is: W' - W is the weight times the numbers, at any strength."""
    model, numbers = linear(), rand(6 if on_input else 8)
    state = {f"{LIN}.weight": numbers, f"{LIN}.on_input": torch.tensor(on_input)}
    change = held(model) * (numbers if on_input else numbers[:, None])
    report = check(model, state, {"blocks.0.lin": change}, kernel=False)
    assert report.kinds == {"ia3": 1} and "ia3" in str(report)
    unchanged(attached(model), {f"{LIN}.weight": numbers}, "not the name of an adapter's tensor")


def cayley(blocks: Tensor, bound: float = 0.0) -> Tensor:
    """One big rotation from blocks [n, b, b]: (I + Q)(I - Q)^-1 of Q = B - B^T, its norm bounded."""
    skew = torch.block_diag(*(blocks - blocks.transpose(1, 2)))
    if bound and skew.norm() > bound:
        skew = skew * bound / skew.norm()
    eye = torch.eye(len(skew))
    return (eye + skew) @ torch.linalg.inv(eye - skew)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 9.0])
@pytest.mark.parametrize("rescaled", [False, True])
def test_row_48_oft_rotates_rows_and_alpha_is_a_bound(alpha: float, rescaled: bool) -> None:
    """R^T W in blocks of rows; alpha times the rows is the largest norm that the skew matrix may have."""
    model, blocks, factor = linear(), rand(2, 4, 4), positive(8, 1)
    state = {f"{LIN}.oft_blocks": blocks, f"{LIN}.alpha": torch.tensor(alpha)}
    state |= {f"{LIN}.rescale": factor} if rescaled else {}
    rotated = cayley(blocks, alpha * 8).T @ held(model)
    change = (factor * rotated if rescaled else rotated) - held(model)
    assert check(model, state, {"blocks.0.lin": change}, kernel=False, atol=5e-6).kinds == {"oft": 1}


def test_row_48_boft_rotates_in_stages() -> None:
    """Blocks of four dimensions are a butterfly: between stages rows change places, 2^stage half blocks apart."""
    model, blocks = linear(), rand(2, 2, 4, 4)
    rotated = held(model)
    for stage in range(2):
        order = torch.arange(8).reshape(-1, 2, 2 * 2**stage).transpose(1, 2).flatten()
        places = torch.eye(8)[order]
        rotated = places.T @ cayley(blocks[stage]) @ places @ rotated
    state = {f"{LIN}.oft_blocks": blocks, f"{LIN}.alpha": torch.tensor(0.0)}
    report = check(model, state, {"blocks.0.lin": rotated - held(model)}, kernel=False, atol=5e-6)
    assert report.kinds == {"boft": 1}


@pytest.mark.parametrize("shared", [False, True])
def test_row_48_oft_of_peft_rotates_columns(shared: bool) -> None:
    """W R^T, R = I + 2Q + 2Q^2 + 2Q^3 + Q^4 of the skew matrix with these numbers above its diagonal."""
    model, numbers = linear(), rand(1 if shared else 2, 3)
    rotations = []
    for row in numbers.expand(2, 3):
        q = torch.zeros(3, 3)
        q[0, 1], q[0, 2], q[1, 2] = row
        q = q - q.T
        rotations.append(torch.eye(3) + 2 * (q + q @ q + q @ q @ q) + q @ q @ q @ q)
    change = held(model) @ torch.block_diag(*rotations).T - held(model)
    check(model, {f"{LIN}.oft_R.weight": numbers}, {"blocks.0.lin": change}, kernel=False, atol=5e-6)


@pytest.mark.parametrize("old", [False, True])
def test_row_48_glora_is_a_function_of_the_base(old: bool) -> None:
    """alpha / r (W a1 a2 + b1 b2); the first files have each pair the other way round."""
    model = linear()
    a1, a2, b1, b2 = rand(6, 2), rand(2, 6, seed=1), rand(8, 2, seed=2), rand(2, 6, seed=3)
    change = (held(model) @ a1 @ a2 + b1 @ b2) / 2
    names = zip(("a2", "a1", "b2", "b1") if old else ("a1", "a2", "b1", "b2"), (a1, a2, b1, b2), strict=True)
    state = {**{f"{LIN}.{name}.weight": value for name, value in names}, f"{LIN}.alpha": torch.tensor(1.0)}
    assert check(model, state, {"blocks.0.lin": change}, kernel=False).kinds == {"glora": 1}


def test_row_48_kinds_that_are_refused_are_named() -> None:
    """What cannot be applied is refused in one line that names the type, and nothing is half applied."""
    for leaf, words in {"ia3_l": "PEFT IA3", "vera_lambda_b": "VeRA", "oft_diag": "old OFT", "boft_R": "BOFT"}.items():
        unchanged(attached(linear()), {**pair(LIN, 8, 6), f"{LIN}.{leaf}": rand(8)}, words)


def test_row_48_a_replaced_weight_and_several_kinds_in_one_file() -> None:
    """set_weight is W + s (value - W); every module has its own kind."""
    model = linear(blocks__1__lin=nn.Linear(6, 8), norm=nn.LayerNorm(8))
    second = LIN.replace("0", "1")
    state = {f"{LIN}.set_weight": rand(8, 6), **pair(second, 8, 6, alpha=1.0), "transformer.norm.diff": rand(8)}
    changes = {"blocks.0.lin": rand(8, 6) - held(model), "blocks.1.lin": product(state, second) / 2, "norm": rand(8)}
    for paths, kernel in ((("blocks.0.lin", "norm"), False), (("blocks.1.lin", "norm"), True)):
        part = {k: v for k, v in state.items() if k.startswith(tuple(f"transformer.{p}" for p in paths))}
        check(model, part, {p: changes[p] for p in paths}, kernel=kernel)
    pipe, before = attached(model), {path: held(model, path) for path in changes}
    with restored(pipe):
        assert pipe.load_lora(state, 0.5).kinds == {"set": 1, "lora": 1, "diff": 1}
        for path, change in changes.items():
            torch.testing.assert_close(held(model, path), before[path] + 0.5 * change)
        pipe.unload_loras()


# ---- values that are no numbers -------------------------------------------------------------------------------------


def bad(kind: str) -> tuple[Files, str]:
    """A file of this kind, and the key of a tensor in it."""
    files: dict[str, tuple[Files, str]] = {
        "lora": (pair(LIN, 8, 6), "lora_B.weight"),
        "alpha": (pair(LIN, 8, 6, alpha=1.0), "alpha"),
        "dora": ({**pair(LIN, 8, 6), f"{LIN}.dora_scale": positive(8, 1)}, "dora_scale"),
        "lokr": ({f"{LIN}.lokr_w1": rand(2, 2), f"{LIN}.lokr_w2": rand(4, 3)}, "lokr_w2"),
        "diff": ({f"{LIN}.diff": rand(8, 6)}, "diff"),
        "bias": ({f"{LIN}.diff_b": rand(8)}, "diff_b"),
        "set": ({f"{LIN}.set_weight": rand(8, 6)}, "set_weight"),
        "ia3": ({f"{LIN}.weight": rand(8), f"{LIN}.on_input": torch.tensor(0)}, "weight"),
        "oft": ({f"{LIN}.oft_blocks": rand(2, 4, 4)}, "oft_blocks"),
    }
    return files[kind]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["lora", "alpha", "dora", "lokr", "diff", "bias", "set", "ia3", "oft"])
def test_row_51_a_value_that_is_no_number_is_refused(kind: str, value: float) -> None:
    """One NaN or infinity anywhere: the error names the module, and model and list are as they were."""
    state, leaf = bad(kind)
    tensor = state[f"{LIN}.{leaf}"].clone()
    tensor.view(-1)[-1] = value
    for mode in ("merged", "kernel"):
        model = linear()
        pipe = attached(model)
        with restored(pipe):
            unchanged(pipe, {**state, f"{LIN}.{leaf}": tensor}, r"blocks\.0\.lin.*NaN or infinite", mode=mode)


def test_row_51_a_product_that_overflows_only_in_the_weight() -> None:
    """Finite fp16 factors whose product is not: refused before anything is written, other layers included."""
    model = linear(blocks__1__lin=nn.Linear(6, 8)).half()
    state = {k: v.half() for k, v in pair(LIN, 8, 6).items()}
    large = {k: torch.full_like(v, 300.0).half() for k, v in pair(LIN.replace("0", "1"), 8, 6).items()}
    for weight, source in ((1.0, {**state, **large}), (1e6, state)):
        unchanged(attached(model), source, "not finite in torch.float16", weight=weight)
    pipe, before = attached(model), held(model).float()
    with restored(pipe):
        pipe.load_lora(state, name="it")
        with pytest.raises(difflora.DiffLoRAError, match="not finite"):
            pipe.set_loras({"it": 1e6})
        wanted = (before + product(state, LIN)).half()
        torch.testing.assert_close(held(model), wanted, rtol=1e-3, atol=1e-3)
        pipe.unload_loras()


def test_row_51_other_storage_types_are_read_as_numbers() -> None:
    """fp8, fp16 and bf16 factors are cast before they are multiplied."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16):
        state = {k: v.to(dtype) for k, v in pair(LIN, 8, 6).items()}
        check(linear(), state, {"blocks.0.lin": product(state, LIN)})


# ---- words (textual inversion) --------------------------------------------------------------------------------------

UNET_Q = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
WORD, PROMPT = "sks", "a sks cat"


def encoded(pipe: Any, prompt: str) -> tuple[Tensor, ...]:
    """Everything that the pipeline's text encoders make of a prompt."""
    with torch.no_grad():
        made = pipe.encode_prompt(prompt, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False)
    return tuple(tensor for tensor in made if tensor is not None)


def words(pipe: Any) -> list[tuple[Any, Any]]:
    """The tokenizers and tables of a pipeline, as objects."""
    parts = [(getattr(pipe, f"tokenizer{n}"), getattr(pipe, f"text_encoder{n}")) for n in ("", "_2")
             if getattr(pipe, f"tokenizer{n}", None) is not None]  # fmt: skip
    return [(tokenizer, encoder.get_input_embeddings()._parameters["weight"]) for tokenizer, encoder in parts]


@pytest.mark.parametrize("count", [1, 2])
def test_row_49_words_in_a_file_are_those_of_load_textual_inversion(count: int, sd: Any) -> None:
    """The pair and the word load; a prompt with it is what diffusers makes of the same vectors; all is undone."""
    theirs, vectors = tiny.sd_pipeline(), rand(count, 16, size=1.0)
    theirs.load_textual_inversion(vectors if count > 1 else vectors[0], token=WORD)
    out, width = sd.unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q").weight.shape
    state = {**pair(UNET_Q, out, width), f"bundle_emb.{WORD}.clip_l": vectors}
    base, plain, own = encoded(sd, PROMPT), encoded(sd, "a cat"), words(sd)
    pipe = difflora.attach(sd)
    with restored(pipe):
        report = pipe.load_lora(state, name="it")
        assert len(report.matched) == 1 and report.unmatched == ()
        (tokenizer, table), (before, short) = words(pipe)[0], own[0]
        assert len(tokenizer) == len(before) + count and table.shape[0] == short.shape[0] + count
        assert WORD not in before.get_vocab()
        for given, wanted in zip(encoded(pipe, PROMPT), encoded(theirs, PROMPT), strict=True):
            torch.testing.assert_close(given, wanted, rtol=0, atol=1e-6)
        assert (encoded(pipe, PROMPT)[0] - base[0]).abs().max() > 1e-3
        torch.testing.assert_close(encoded(pipe, "a cat")[0], plain[0], rtol=0, atol=0)
        for undo in (lambda: pipe.set_loras({}), pipe.unload_loras):
            undo()
            assert [a is b for one, two in zip(words(pipe), own, strict=True) for a, b in zip(one, two, strict=True)]
            assert words(pipe)[0][0] is before and words(pipe)[0][1] is short
            assert torch.equal(encoded(pipe, PROMPT)[0], base[0])
            if "it" in [state.name for state in pipe.loras]:
                pipe.set_loras({"it": 1.0})
    assert torch.equal(encoded(pipe, PROMPT)[0], base[0])


def test_row_49_words_of_both_encoders_of_sdxl(sdxl: Any) -> None:
    """clip_l is for the first, clip_g for the second; words of two adapters stand beside each other."""
    theirs = tiny.sdxl_pipeline()
    vectors = {(word, n): rand(2, 16, seed=seed, size=1.0)
               for seed, (word, n) in enumerate((w, n) for w in ("sks", "zwx") for n in ("", "_2"))}  # fmt: skip
    for (word, n), value in vectors.items():
        encoder, tokenizer = getattr(theirs, f"text_encoder{n}"), getattr(theirs, f"tokenizer{n}")
        theirs.load_textual_inversion(value, token=word, text_encoder=encoder, tokenizer=tokenizer)
    stem = "lora_te2_text_model_encoder_layers_0_mlp_fc1"
    states = {w: {**pair(stem, 24, 16), f"bundle_emb.{w}.clip_l": vectors[w, ""],
                  f"bundle_emb.{w}.clip_g": vectors[w, "_2"]} for w in ("sks", "zwx")}  # fmt: skip
    pipe, own = difflora.attach(sdxl), words(sdxl)
    with restored(pipe):
        for word, state in states.items():
            pipe.load_lora(state, {"text_encoder_2": 0.0}, name=word)
        prompt = "zwx and sks"
        for given, wanted in zip(encoded(pipe, prompt), encoded(theirs, prompt), strict=True):
            torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)
        pipe.unload_lora("sks")
        assert words(pipe)[0][1].shape[0] == own[0][1].shape[0] + 2
        with pytest.raises(DiffLoRAError, match="already"):
            pipe.load_lora(states["zwx"], name="again")
        pipe.unload_loras()
    assert all(a is b for one, two in zip(words(pipe), own, strict=True) for a, b in zip(one, two, strict=True))


def test_row_49_words_of_clip_and_t5_in_one_file(flux: Any) -> None:
    """A T5 reads its table under two names; both are longer while the word is in force."""
    theirs, vectors = tiny.flux_pipeline(), {"": rand(2, 16, size=1.0), "_2": rand(1, 24, size=1.0)}
    for n, value in vectors.items():
        encoder, tokenizer = getattr(theirs, f"text_encoder{n}"), getattr(theirs, f"tokenizer{n}")
        theirs.load_textual_inversion(value, token=WORD, text_encoder=encoder, tokenizer=tokenizer)
    pipe, own = difflora.attach(flux), words(flux)
    state = pair("lora_unet_double_blocks_0_img_attn_proj", 32, 32)
    state |= {f"bundle_emb.{WORD}.clip_l": vectors[""], f"bundle_emb.{WORD}.t5": vectors["_2"]}
    with restored(pipe):
        pipe.load_lora(state)
        made = [p.encode_prompt(PROMPT, PROMPT, device="cpu", max_sequence_length=16) for p in (pipe, theirs)]
        for given, wanted in zip(*made, strict=True):
            torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)
        pipe.unload_loras()
    assert all(a is b for one, two in zip(words(pipe), own, strict=True) for a, b in zip(one, two, strict=True))


def test_row_49_words_that_fit_nowhere_are_refused(sd: Any) -> None:
    """Another width, NaN, a word that the tokenizer has, an encoder that is not there: refused by name."""
    out, width = sd.unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q").weight.shape
    factors, pipe = pair(UNET_Q, out, width), difflora.attach(sd)
    own, good = words(sd), rand(1, 16)
    for name, value, match in (
        (f"{WORD}.clip_l", rand(1, 17), f"{WORD}.*17"), (f"{WORD}.clip_l", good * float("nan"), "NaN or infinite"),
        ("a.clip_l", good, "already"), (f"{WORD}.clip_g", good, "clip_g"), (f"{WORD}.t5", good, "t5xxl"),
        (f"{WORD}.clip_l_out", good, "output embedding"),
    ):  # fmt: skip
        unchanged(pipe, {**factors, f"bundle_emb.{name}": value}, match)
        assert words(pipe)[0] == own[0]


# ---- control LoRAs: wider inputs ------------------------------------------------------------------------------------


def control(pipe: Any) -> tuple[Files, Files]:
    """A control LoRA in BFL's names, and the changes that it makes to a tiny FLUX.1: x_embedder's has more columns."""
    transformer, stem = pipe.transformer, "double_blocks.0.img_attn."
    wide = 2 * transformer.config.in_channels
    state = {**pair("img_in", 32, wide), "img_in.lora_B.bias": rand(32, seed=3),
             **pair(stem + "qkv", 96, 32, seed=4), stem + "qkv.lora_B.bias": rand(96, seed=5),
             stem + "norm.query_norm.scale": positive(16, seed=6)}  # fmt: skip
    block = "transformer_blocks.0.attn."
    changes = {"x_embedder": product(state, "img_in"), "x_embedder.bias": rand(32, seed=3),
               f"{block}norm_q": positive(16, seed=6) - held(transformer, f"{block}norm_q")}  # fmt: skip
    for name, rows, more in zip("qkv", product(state, stem + "qkv").chunk(3), rand(96, seed=5).chunk(3), strict=True):
        changes |= {f"{block}to_{name}": rows, f"{block}to_{name}.bias": more}
    return state, changes


@pytest.mark.parametrize("mode", ["merged", "kernel", "auto"])
def test_a_control_lora_widens_the_input_while_it_acts(mode: str, flux: Any) -> None:
    """The old columns keep their weight, the new ones start at zero; norms are replaced; unloading undoes all of it."""
    pipe, model, original = difflora.attach(flux), flux.transformer, flux.transformer.x_embedder.weight
    state, changes = control(pipe)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with restored(pipe):
        pipe.load_lora(state, 0.0, name="it", mode=mode)
        for undo in (lambda: pipe.set_loras({}), pipe.unload_loras):
            for strength in (1.0, 0.5):
                pipe.set_loras({"it": strength})
                assert (model.config.in_channels, model.x_embedder.in_features) == (32, 32)
                x = rand(3, 32, seed=9, size=1.0)
                for path, columns in (("x_embedder", 16), ("transformer_blocks.0.attn.to_k", 32)):
                    base, given = before[f"{path}.weight"], x[:, :32] if path == "x_embedder" else x
                    full = torch.nn.functional.pad(base, (0, 32 - columns)) + strength * changes[path]
                    wanted = given @ full.T + before[f"{path}.bias"] + strength * changes[f"{path}.bias"]
                    torch.testing.assert_close(model.get_submodule(path)(given), wanted, rtol=1e-5, atol=1e-5)
                norm = before["transformer_blocks.0.attn.norm_q.weight"]
                wanted = norm + strength * changes["transformer_blocks.0.attn.norm_q"]
                torch.testing.assert_close(held(model, "transformer_blocks.0.attn.norm_q"), wanted, rtol=0, atol=1e-6)
            undo()
            assert (model.config.in_channels, model.x_embedder.in_features) == (16, 16)
            assert model.x_embedder.weight is original
            assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_control_lora_beside_an_ordinary_one(flux: Any) -> None:
    """An adapter for the narrow input acts on the first columns of the wide one, in whatever order they come."""
    pipe, model = difflora.attach(flux), flux.transformer
    state, changes = control(pipe)
    narrow = pair("transformer.x_embedder", 32, 16, seed=7)
    base, x = held(model, "x_embedder"), rand(3, 32, seed=9, size=1.0)
    alone = base + 0.5 * product(narrow, "transformer.x_embedder")
    wide = torch.nn.functional.pad(alone, (0, 16)) + changes["x_embedder"]
    bias = model.x_embedder.bias.detach() + changes["x_embedder.bias"]
    for order in (("control", "narrow"), ("narrow", "control")):
        for mode in ("merged", "kernel"):
            with restored(pipe):
                for name in order:
                    source, weight = {"control": (state, 1.0), "narrow": (narrow, 0.5)}[name]
                    pipe.load_lora(source, weight, name=name, mode=mode)
                torch.testing.assert_close(model.x_embedder(x), x @ wide.T + bias, rtol=1e-5, atol=1e-5)
                pipe.unload_lora("control")
                given = x[:, :16] @ alone.T + model.x_embedder.bias
                torch.testing.assert_close(model.x_embedder(x[:, :16]), given, rtol=1e-5, atol=1e-5)
                pipe.unload_loras()


def test_a_control_lora_for_another_component(flux: Any) -> None:
    """Sent to the second transformer, it widens that one and leaves the first alone."""
    state, changes = control(flux)
    pipe = attached(flux.transformer, transformer_2=tiny.flux_transformer())
    first, second = pipe.transformer, pipe.transformer_2
    wanted = torch.nn.functional.pad(held(second, "x_embedder"), (0, 16)) + changes["x_embedder"]
    with restored(pipe):
        pipe.load_lora(state, component="transformer_2")
        assert (first.config.in_channels, second.config.in_channels) == (16, 32)
        torch.testing.assert_close(held(second, "x_embedder"), wanted, rtol=0, atol=1e-6)
        pipe.unload_loras()


def test_a_control_lora_needs_weights_that_can_be_written(flux: Any) -> None:
    """Wider inputs have no form beside the weight: named in the report, and refused on fp8 weights."""
    state, _ = control(flux)
    assert "(lora, set) have no kernel form" in str(difflora.attach(flux).load_lora(state, mode="kernel").notes)
    other = tiny.flux_pipeline()
    other.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32, skip_modules_pattern=("norm",))
    pipe = difflora.attach(other)
    with pytest.raises(DiffLoRAError, match=r"transformer\.x_embedder"):
        pipe.load_lora({k: v for k, v in state.items() if "img_in" in k})
    assert len(pipe.loras) == 0 and other.transformer.config.in_channels == 16


def test_wider_inputs_that_no_family_knows_are_refused(flux: Any) -> None:
    """Only where a family says so may a file have more columns than the model."""
    stem = "transformer.transformer_blocks.0.attn.to_q"
    unchanged(difflora.attach(flux), pair(stem, 32, 64), r"\[32, 64\] in the file, \[32, 32\] in the model")
    unchanged(difflora.attach(flux), pair("transformer.x_embedder", 32, 8), r"\[32, 8\] in the file")


@pytest.mark.parametrize("mode", ["merged", "kernel"])
def test_a_control_pipeline_draws_what_a_wide_model_draws(mode: str, flux: Any) -> None:
    """The pipeline reads the number of channels from the config: its picture is that of a model built wide."""
    state, changes = control(flux)
    made = tiny.flux_transformer(in_channels=32, out_channels=16)
    values = {n: p.detach().clone() for n, p in flux.transformer.named_parameters()}
    values["x_embedder.weight"] = torch.nn.functional.pad(values["x_embedder.weight"], (0, 16))
    for path, change in changes.items():
        name = path if path in values else f"{path}.weight"
        values[name] = values[name] + 0.5 * change
    made.load_state_dict(values)
    parts = {name: part for name, part in flux.components.items() if name not in ("image_encoder", "feature_extractor")}
    wanted = controlled(FluxControlPipeline(**{**parts, "transformer": made}))
    pipe = difflora.attach(FluxControlPipeline(**parts))
    with restored(pipe):
        pipe.load_lora(state, 0.5, mode=mode)
        torch.testing.assert_close(controlled(pipe), wanted, rtol=1e-4, atol=1e-5)
        pipe.unload_loras()


def controlled(pipe: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    return tiny.run(pipe, control_image=torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
                    num_inference_steps=1, max_sequence_length=8)  # fmt: skip
