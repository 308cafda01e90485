"""Every file that cannot be honoured gives one clear error, and nothing changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file

import difflora
from difflora import DiffLoRAError

Q = "transformer_blocks.0.attn.to_q"
File = Callable[[Path, FluxPipeline], Any]


def pair(pipe: FluxPipeline, **options: Any) -> dict[str, torch.Tensor]:
    return tiny.lora_dict(pipe.transformer, [Q], **options)


def saved(folder: Path, tensors: dict[str, torch.Tensor], name: str = "x.safetensors") -> Path:
    save_file(tensors, folder / name)
    return folder / name


def peft_folder(folder: Path, pipe: FluxPipeline, **config: Any) -> Path:
    saved(folder, tiny.lora_dict(pipe.transformer, [Q], prefix="base_model.model."), "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, **config}))
    return folder


def unknown_key(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, {**pair(pipe), f"transformer.{Q}.frobnicate": torch.ones(2)})


def other_family(folder: Path, pipe: FluxPipeline) -> Any:
    unet = tiny.sd_pipeline().unet
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    return saved(folder, tiny.lora_dict(unet, [name], prefix="unet."))


def other_size(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, tiny.lora_dict(tiny.flux_transformer(num_attention_heads=4), [Q]))


def half_pair(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, {k: v for k, v in pair(pipe).items() if "lora_B" not in k})


def ranks_differ(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, {k: v if "lora_A" in k else v[:, :2].clone() for k, v in pair(pipe).items()})


def not_a_number(folder: Path, pipe: FluxPipeline) -> Any:
    tensors = pair(pipe)
    tensors[f"transformer.{Q}.lora_B.weight"][3, 1] = float("nan")
    return saved(folder, tensors)


def infinite_alpha(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, pair(pipe, alpha=float("inf")))


def contradicting_rank(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, r=8)


def dora_config(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, use_dora=True)


def other_peft_type(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, peft_type="LOHA")


def broken_config(folder: Path, pipe: FluxPipeline) -> Any:
    peft_folder(folder, pipe)
    (folder / "adapter_config.json").write_text("{'r': 3}")
    return folder


def negative_alpha_config(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, lora_alpha=-1)


def slow_pattern(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, alpha_pattern={"(a+)+b": 1.0})


def pattern_of_many_repetitions(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, alpha_pattern={".*" * 10 + "=": 1.0})


def pattern_of_many_choices(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, alpha_pattern={"(a|a)" * 40: 1.0})


def pattern_with_flags(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, rank_pattern={"(?i)to_q": 3})


def deep_config(folder: Path, pipe: FluxPipeline) -> Any:
    peft_folder(folder, pipe)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    return folder


def deep_metadata(folder: Path, pipe: FluxPipeline) -> Any:
    save_file(pair(pipe), folder / "x.safetensors", metadata={"lora_adapter_metadata": "[" * 100_000})
    return folder / "x.safetensors"


def alpha_beyond_floats(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, lora_alpha=10**400)


def rslora_as_a_word(folder: Path, pipe: FluxPipeline) -> Any:
    return peft_folder(folder, pipe, use_rslora="false")


def whole_numbers(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, {k: (v * 50).to(torch.int8) for k, v in pair(pipe).items()})


def complex_numbers(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, {k: v.to(torch.complex64) for k, v in pair(pipe).items()})


def complex_alpha(folder: Path, pipe: FluxPipeline) -> Any:
    return saved(folder, {**pair(pipe), f"transformer.{Q}.alpha": torch.tensor(1j)})


class Marker:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(folder: Path, pipe: FluxPipeline) -> Any:
    (folder / "x.pt").write_bytes(pickle.dumps(Marker(folder / "marker")))
    return folder / "x.pt"


def truncated(folder: Path, pipe: FluxPipeline) -> Any:
    whole = saved(folder, pair(pipe)).read_bytes()
    (folder / "x.safetensors").write_bytes(whole[:-7])
    return folder / "x.safetensors"


def huge_header(folder: Path, pipe: FluxPipeline) -> Any:
    (folder / "x.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    return folder / "x.safetensors"


def lying_shape(folder: Path, pipe: FluxPipeline) -> Any:
    header = json.dumps({"a.lora_A.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    (folder / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    return folder / "x.safetensors"


def empty_file(folder: Path, pipe: FluxPipeline) -> Any:
    (folder / "x.safetensors").touch()
    return folder / "x.safetensors"


def no_match(folder: Path, pipe: FluxPipeline) -> Any:
    tensors = pair(pipe)
    return saved(folder, {k.replace("blocks.0", "blocks.7"): v for k, v in tensors.items()})


def part_match(folder: Path, pipe: FluxPipeline) -> Any:
    tensors = pair(pipe)
    return saved(folder, {**tensors, **{k.replace("blocks.0", "blocks.7"): v.clone() for k, v in tensors.items()}})


def half_a_loha(folder: Path, pipe: FluxPipeline) -> Any:
    stem = f"lora_unet_{Q.replace('.', '_')}"
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a")
    return saved(
        folder, {f"{stem}.{name}": torch.ones(32, 2) if name.endswith("a") else torch.ones(2, 32) for name in names}
    )


def two_slots(folder: Path, pipe: FluxPipeline) -> Any:
    tensors = {k.replace(".weight", ".one.weight"): v for k, v in pair(pipe).items()}
    return saved(folder, {**tensors, **{k.replace(".one.", ".two."): v.clone() for k, v in tensors.items()}})


def nothing_there(folder: Path, pipe: FluxPipeline) -> Any:
    return folder / "absent.safetensors"


def empty_folder(folder: Path, pipe: FluxPipeline) -> Any:
    return folder


def nameless_tensor(folder: Path, pipe: FluxPipeline) -> Any:
    return {**pair(pipe), 1: torch.ones(1)}


def sparse_tensors(folder: Path, pipe: FluxPipeline) -> Any:
    return {k: v.to_sparse() for k, v in pair(pipe).items()}


def no_source(folder: Path, pipe: FluxPipeline) -> Any:
    return ""


def not_a_source(folder: Path, pipe: FluxPipeline) -> Any:
    return [1]


def endless_name(folder: Path, pipe: FluxPipeline) -> Any:
    return "a" * 5000


def nobodys_home(folder: Path, pipe: FluxPipeline) -> Any:
    return "~nobody-of-that-name/x"


def numbers_in_a_dict(folder: Path, pipe: FluxPipeline) -> Any:
    return {f"transformer.{Q}.lora_A.weight": 3.0}


# file -> what the one error must say
REFUSED: dict[File, tuple[str, ...]] = {
    unknown_key: ("x.safetensors", "frobnicate"),
    other_family: ("x.safetensors", "unet"),
    other_size: ("x.safetensors", f"transformer.{Q}", "[64, 64]", "[32, 32]"),
    half_pair: ("x.safetensors", Q),
    ranks_differ: ("x.safetensors", Q),
    not_a_number: ("x.safetensors", f"transformer.{Q}", "NaN"),
    infinite_alpha: ("x.safetensors", f"transformer.{Q}", "infinite"),
    contradicting_rank: ("rank 8", "rank 3"),
    dora_config: ("use_dora", "DoRA"),
    other_peft_type: ("LOHA",),
    broken_config: ("adapter_config.json", "JSON"),
    negative_alpha_config: ("lora_alpha", "-1"),
    slow_pattern: ("alpha_pattern", "(a+)+b"),
    pattern_of_many_repetitions: ("alpha_pattern", ".*.*"),
    pattern_of_many_choices: ("alpha_pattern", "(a|a)"),
    pattern_with_flags: ("rank_pattern", "(?i)to_q"),
    deep_config: ("adapter_config.json", "JSON"),
    deep_metadata: ("x.safetensors", "JSON"),
    alpha_beyond_floats: ("lora_alpha", "positive number"),
    rslora_as_a_word: ("use_rslora", "'false'"),
    whole_numbers: (f"transformer.{Q}", "int8"),
    complex_numbers: (f"transformer.{Q}", "complex64"),
    complex_alpha: (f"transformer.{Q}", "complex64"),
    pickled: ("x.pt", "pickle", "allow_pickle"),
    truncated: ("x.safetensors", "safetensors"),
    huge_header: ("x.safetensors", "safetensors"),
    lying_shape: ("x.safetensors", "safetensors"),
    empty_file: ("x.safetensors", "safetensors"),
    no_match: ("x.safetensors", "transformer_blocks.7", "none of its 1 modules"),
    part_match: ("x.safetensors", "transformer_blocks.7", "strict=False", "1 of its 2"),
    half_a_loha: ("hada_w2_b", "x.safetensors"),
    two_slots: ("one", "two"),
    nothing_there: ("absent.safetensors",),
    empty_folder: ("no .safetensors",),
    nameless_tensor: ("1: Tensor",),
    sparse_tensors: (Q, "dense"),
    no_source: ("''", "expected a path"),
    not_a_source: ("[1]", "expected a path"),
    endless_name: ("aaa", "too long"),
    nobodys_home: ("~nobody-of-that-name/x",),
    numbers_in_a_dict: ("float",),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_with_the_reason_and_nothing_changed(make: File, flux: FluxPipeline, tmp_path: Path) -> None:
    pipe = difflora.attach(flux)
    pipe.load_lora(tiny.lora_dict(pipe.transformer, [Q, "proj_out"], seed=9), 0.5, name="before")
    before, output, table = tiny.weights(pipe), tiny.run(pipe), repr(pipe.loras)
    source = make(tmp_path, pipe)

    with pytest.raises(DiffLoRAError) as caught:
        pipe.load_lora(source)

    for words in REFUSED[make]:
        assert words in str(caught.value), str(caught.value)
    after = tiny.weights(pipe)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert repr(pipe.loras) == table and torch.equal(tiny.run(pipe), output)
    assert not any("forward" in m.__dict__ for m in pipe.transformer.modules())
    assert not (tmp_path / "marker").exists()


def test_part_of_a_file_applies_only_when_asked(flux: FluxPipeline, tmp_path: Path) -> None:
    pipe = difflora.attach(flux)
    report = pipe.load_lora(part_match(tmp_path, pipe), strict=False)
    assert report.partial
    assert report.matched == (f"transformer.{Q}",)
    assert report.unmatched == ("transformer.transformer_blocks.7.attn.to_q",)


def test_tensors_of_a_pickle_load_only_when_allowed(flux: FluxPipeline, tmp_path: Path) -> None:
    pipe = difflora.attach(flux)
    torch.save(pair(pipe), tmp_path / "x.pt")
    with pytest.raises(DiffLoRAError, match="allow_pickle"):
        pipe.load_lora(tmp_path / "x.pt")
    assert pipe.load_lora(tmp_path / "x.pt", allow_pickle=True).matched == (f"transformer.{Q}",)
    torch.save({k: v.to_sparse() for k, v in pair(pipe).items()}, tmp_path / "sparse.pt")
    with pytest.raises(DiffLoRAError, match="plain state dict"):
        pipe.load_lora(tmp_path / "sparse.pt", allow_pickle=True, name="z")
    with pytest.raises(DiffLoRAError, match="tensors alone"):
        pipe.load_lora(pickled(tmp_path, pipe), allow_pickle=True, name="y")
    assert not (tmp_path / "marker").exists()


def test_a_weight_that_is_no_finite_number_is_refused(flux: FluxPipeline) -> None:
    pipe = difflora.attach(flux)
    for weight in (float("nan"), float("inf"), 10**400, "1", True, None, {"transformer": "x"}):
        with pytest.raises(DiffLoRAError, match="finite number"):
            pipe.load_lora(pair(pipe), weight)
    assert len(pipe.loras) == 0


@pytest.mark.parametrize(
    "weight", [{"transformer": {5: 1}}, {"transformer_blocks.²-³": 1}, {"blocks.0-" + "9" * 5000: 1}]
)
def test_a_pattern_that_cannot_be_one_is_refused(weight: Any, flux: FluxPipeline) -> None:
    pipe = difflora.attach(flux)
    with pytest.raises(DiffLoRAError, match="pattern"):
        pipe.load_lora(pair(pipe), weight)
    assert len(pipe.loras) == 0


def test_hundreds_of_module_patterns_take_no_time(flux: FluxPipeline, tmp_path: Path) -> None:
    """More than `re` caches: each is compiled once, not once a module."""
    ranks = {f"transformer_blocks.{i}.attn.to_q": 3 for i in range(2000)}
    folder = peft_folder(tmp_path, flux, rank_pattern=ranks)
    with mock.patch("re.match", side_effect=AssertionError):
        assert difflora.load(folder).components["transformer"][Q].scale == 2


def test_a_config_with_a_byte_order_mark_is_read(flux: FluxPipeline, tmp_path: Path) -> None:
    config = peft_folder(tmp_path, flux) / "adapter_config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")
    assert difflora.load(tmp_path).components["transformer"][Q].scale == 2
