"""Which kinds of adapter load for which family in which layout: measured on small files, one per combination.

`python tests/support.py` writes tests/support.json; the README's table is made from it and a test measures it again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import difflora
from difflora import DiffLoRAError
from difflora.formats.families import FAMILIES
from difflora.formats.rules import Family, Rule

RECORD = Path(__file__).parent / "support.json"
Tensors = dict[str, Tensor]
D = 16
UNEVEN = "the file's fused module has parts of different heights, which tensors of this kind do not tell apart"

# layout -> (native or canonical names, the stem that they become)
LAYOUTS: Mapping[str, tuple[bool, Callable[[str, str], str]]] = {
    "kohya": (True, lambda name, denoiser: "lora_unet_" + name.replace(".", "_")),
    "comfy": (True, lambda name, denoiser: f"diffusion_model.{name}"),
    "bare": (True, lambda name, denoiser: name),
    "diffusers": (False, lambda name, denoiser: f"{denoiser}.{name}"),
    "peft": (False, lambda name, denoiser: f"base_model.model.{name}"),
    "lycoris": (False, lambda name, denoiser: "lycoris_" + name.replace(".", "_")),
    "onetrainer": (False, lambda name, denoiser: "lora_transformer_" + name.replace(".", "_")),
}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _pair(stem: str, rows: int, cols: int) -> Tensors:
    return {f"{stem}.lora_down.weight": _random(2, cols), f"{stem}.lora_up.weight": _random(rows, 2)}


def _alpha(stem: str) -> Tensors:
    return {f"{stem}.alpha": torch.tensor(1.0)}


# kind -> the tensors of a module of this size
KINDS: Mapping[str, Callable[[str, int, int], Tensors]] = {
    "LoRA": lambda s, o, i: _pair(s, o, i) | _alpha(s),
    "LoHa": lambda s, o, i: (
        {f"{s}.hada_w{n}_a": _random(o, 2) for n in "12"}
        | {f"{s}.hada_w{n}_b": _random(2, i) for n in "12"}
        | _alpha(s)
    ),
    "LoKr": lambda s, o, i: (
        {f"{s}.lokr_w1": _random(4, 4), f"{s}.lokr_w2_a": _random(o // 4, 2), f"{s}.lokr_w2_b": _random(2, i // 4)}
        | _alpha(s)
    ),
    "DoRA": lambda s, o, i: _pair(s, o, i) | _alpha(s) | {f"{s}.dora_scale": _random(o, 1).abs()},
    "DoRA by input": lambda s, o, i: _pair(s, o, i) | _alpha(s) | {f"{s}.dora_scale": _random(1, i).abs()},
    "GLoRA": lambda s, o, i: (
        {f"{s}.a1.weight": _random(i, 2), f"{s}.a2.weight": _random(2, i)}
        | {f"{s}.b1.weight": _random(o, 2), f"{s}.b2.weight": _random(2, i)}
        | _alpha(s)
    ),
    "IA3": lambda s, o, i: {f"{s}.weight": _random(o), f"{s}.on_input": torch.tensor(0)},
    "OFT": lambda s, o, i: {f"{s}.oft_blocks": _random(o // 4, 4, 4) / 9, f"{s}.alpha": torch.tensor(0.0)},
    "BOFT": lambda s, o, i: {f"{s}.oft_blocks": _random(2, o // 4, 4, 4) / 9, f"{s}.alpha": torch.tensor(0.0)},
    "OFT v2": lambda s, o, i: {f"{s}.oft_R.weight": _random(i // 4, 6) / 9},
    "differences of weights and biases": lambda s, o, i: {f"{s}.diff": _random(o, i), f"{s}.diff_b": _random(o)},
    "LoRA bias": lambda s, o, i: (
        {f"{s}.lora_A.weight": _random(2, i), f"{s}.lora_B.weight": _random(o, 2), f"{s}.lora_B.bias": _random(o)}
    ),
    "replaced weights": lambda s, o, i: {f"{s}.set_weight": _random(o, i)},
}


def modules(family: Family) -> list[tuple[Rule, tuple[int, ...]]]:
    """A renamed module and, where the family has one, a fused one, with the rows of their parts."""
    rules = [rule for rule in family.network.rules if "norm" not in rule.source and not rule.perm and not rule.heads]
    fused = [rule for rule in rules if len(rule.sections) > 1][:1]
    taken = {section for rule in fused for section in rule.sections}
    plain = [rule for rule in rules if not rule.rows and not taken & set(rule.sections)][:1]
    plain = plain or [Rule(name, (name,)) for name in family.network.names[:1]]
    rows = {"D": D}
    return [(rule, tuple(rows.get(str(row), 2 * D) for row in rule.rows) or (D,)) for rule in (*plain, *fused)]


def outcome(family: Family, layout: str, kind: str) -> str:
    """`loads`, or the reason of the refusal."""
    native, stem = LAYOUTS[layout]
    tensors: Tensors = {}
    expected: set[str] = set()
    for rule, rows in modules(family):
        parts = [(rule.source, sum(rows))] if native else list(zip(rule.sections, rows, strict=True))
        for name, height in parts:
            tensors |= KINDS[kind](stem(_numbered(name), family.denoiser), height, D)
        expected |= {_numbered(section) for section in rule.sections}
    try:
        adapter = difflora.load(tensors, family=family.name)
    except DiffLoRAError as error:
        return str(error).removeprefix("the state dict").strip(": ").split(".")[0]
    if adapter.uneven:
        return UNEVEN
    found = {path.removesuffix(".bias") for path in adapter.components[family.denoiser]}
    return "loads" if found == expected else f"changes {sorted(found ^ expected)[:2]}"


def _numbered(pattern: str) -> str:
    for name in ("{i}", "{j}", "{k}"):
        pattern = pattern.replace(name, "0")
    return pattern


def measure() -> dict[str, object]:
    """What was tried, and the reason for each combination (family, layout, kind) that does not load."""
    tried = itertools.product(FAMILIES, LAYOUTS, KINDS)
    refused = {
        f"{family.name}, {layout}, {kind}": reason
        for family, layout, kind in tried
        if (reason := outcome(family, layout, kind)) != "loads"
    }
    families = [family.name for family in FAMILIES]
    return {"families": families, "layouts": list(LAYOUTS), "kinds": list(KINDS), "refused": refused}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
