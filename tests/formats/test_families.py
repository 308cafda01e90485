"""Every family's table against its models, built from published configurations on the meta device, at full size.

`models/*.json` hold the configurations and where they are published.  `shares` names further families that a whole file
of the model is one of, `alike` more of them where its names are canonical, `spare` the names that only a related model
has, `ambiguous` the modules whose native names are other modules' canonical ones: they are refused.
"""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import diffusers.models
import pytest
import torch

from difflora.formats.errors import DiffLoRAError
from difflora.formats.families import FAMILIES
from difflora.formats.kinds import Shape
from difflora.formats.match import explain
from difflora.formats.rules import Family, Network, Rule, outline, sections

MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
BY_NAME = {family.name: family for family in FAMILIES}
RANK = 4


@dataclass(frozen=True)
class Case:
    """A family and its models."""

    family: Family
    models: tuple["Model", ...]
    spare: tuple[str, ...]
    ambiguous: tuple[Rule, ...]

    @property
    def networks(self) -> dict[str, Network]:
        """The network of each component that has a model here."""
        found = {self.family.denoiser: self.family.network}
        found |= {e.component: e.network for e in self.family.encoders if e.component in e.places}
        return {model.component: found[model.component] for model in self.models}

    @property
    def denoisers(self) -> Iterator["Model"]:
        return (model.thin for model in self.models if model.component == self.family.denoiser)


@dataclass(frozen=True)
class Model:
    """{module or parameter path: shape} of one component, and the families that a whole file for it is one of.

    `alike` are further ones where the file has canonical names.
    """

    component: str
    shapes: dict[str, Shape]
    families: frozenset[str]
    alike: frozenset[str]

    @cached_property
    def thin(self) -> "Model":
        """The same with the first layers and the last of each kind."""
        kinds: dict[str, list[str]] = {}
        for path in self.shapes:
            kinds.setdefault(outline(path)[0], []).append(path)
        kept = {path for paths in kinds.values() for path in (*paths[:2], paths[-1])}
        shapes = {path: shape for path, shape in self.shapes.items() if path in kept}
        return replace(self, shapes=shapes)


@cache
def case(name: str) -> Case:
    data = json.loads((MODELS / f"{name}.json").read_text())
    models = tuple(
        Model(
            entry["component"],
            modules(entry["class"], entry["config"]),
            frozenset((data["family"], *entry.get("shares", ()))),
            frozenset(entry.get("alike", ())),
        )
        for entry in data["models"]
    )
    ambiguous = tuple(Rule("", (path,)) for path in data.get("ambiguous", ()))
    return Case(BY_NAME[data["family"]], models, tuple(data.get("spare", ())), ambiguous)


def modules(name: str, config: dict[str, Any]) -> dict[str, Shape]:
    with torch.device("meta"):
        model = model_class(name).from_config(config)
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    return {key.removesuffix(".weight"): shape for key, shape in shapes.items() if not key.endswith(".bias")}


@cache
def model_class(name: str) -> Any:
    for module in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        if not module.ispkg and (found := getattr(importlib.import_module(module.name), name, None)):
            return found
    raise LookupError(name)


def instances(rule: Rule, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The source and the sections of a rule, for each layer in which the model has all of these."""
    pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(rule.sections[0]))
    for path in shapes:
        if match := re.fullmatch(pattern, path):
            names = [_fill(text, match.groupdict()) for text in (rule.source, *rule.sections)]
            if all(section in shapes for section in names[1:]):
                yield names[0], tuple(names[1:])


def _fill(text: str, captures: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: captures[match[1]], text)


@pytest.mark.parametrize("name", NAMES)
def test_every_module_of_the_models_has_a_name(name: str) -> None:
    known = case(name)
    for model in known.models:
        network = known.networks[model.component]
        assert [path for path in model.shapes if not network.find(*outline(path), flat=False)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_module_of_a_model(name: str) -> None:
    known = case(name)
    for component, network in known.networks.items():
        shapes = {path: shape for m in known.models if m.component == component for path, shape in m.shapes.items()}
        patterns = dict.fromkeys((*network.names, *sections(network.rules)))
        missing = [text for text in patterns if not any(instances(Rule("", (text,)), shapes))]
        assert missing == [text for text in patterns if component == known.family.denoiser and text in known.spare]


@pytest.mark.parametrize("name", NAMES)
def test_fused_rows_are_those_of_the_parts(name: str) -> None:
    known = case(name)
    for component, network in known.networks.items():
        rules = (*network.rules, *(known.family.slotted if component == known.family.denoiser else ()))
        for rule in (rule for rule in rules if rule.rows):
            fitting = [rows_fit(rule, model.shapes, parts) for model in known.models for parts in layers(rule, model)]
            assert any(fitting), rule
            assert rule.whole or all(fitting), rule


def layers(rule: Rule, model: Model) -> Iterator[tuple[str, ...]]:
    return (parts for _, parts in instances(rule, model.shapes))


def rows_fit(rule: Rule, shapes: Mapping[str, Shape], parts: tuple[str, ...]) -> bool:
    rows = [shapes[part][0] for part in parts]
    (cols,) = {shapes[part][1] for part in parts}
    spans = rule.spans(sum(rows), cols)
    return spans is not None and [sum(stop - start for start, stop in part) for part in spans] == rows


def down_up(path: str, rows: int, shape: Shape, ends: tuple[str, str]) -> dict[str, Shape]:
    """A LoRA of a matrix, or the whole change of anything else."""
    if len(shape) != 2:
        return {f"{path}.diff": (rows, *shape[1:])}
    return {f"{path}.{ends[0]}.weight": (RANK, shape[1]), f"{path}.{ends[1]}.weight": (rows, RANK)}


def plain(known: Case, model: Model) -> dict[str, Shape]:
    """The modules of a model, without those whose names are ambiguous."""
    left_out = {parts[0] for rule in known.ambiguous for parts in layers(rule, model)}
    return {path: shape for path, shape in model.shapes.items() if path not in left_out}


def native(shapes: Mapping[str, Shape], rules: Iterable[Rule]) -> Iterator[tuple[str, int, Shape]]:
    """(native name, rows, shape of its first part) for every module, by the first rule that has it."""
    left = dict.fromkeys(shapes)
    for rule in rules:
        for source, parts in instances(rule, shapes):
            if all(part in left for part in parts):
                for part in parts:
                    del left[part]
                yield source, sum(shapes[part][0] for part in parts), shapes[parts[0]]
    yield from ((path, shapes[path][0], shapes[path]) for path in left)


# Prefix, whether names are flattened, the ends of the keys, whether the first rule for a module counts or the last.
SPELLINGS = {
    "dotted": ("diffusion_model.", False, ("lora_A", "lora_B"), 1),
    "flat": ("lora_unet_", True, ("lora_down", "lora_up"), 1),
    "bare": ("", False, ("lora_A.default", "lora_B.default"), 1),
    "dotted, other": ("base_model.model.", False, ("lora_A", "lora_B"), -1),
    "flat, other": ("lora_unet_", True, ("lora_down", "lora_up"), -1),
}


def file_of(known: Case, model: Model, spelling: str) -> dict[str, Shape]:
    keys: dict[str, Shape] = {}
    if spelling == "canonical":
        for path, shape in plain(known, model).items():
            keys |= down_up(f"{model.component}.{path}", shape[0], shape, ("lora_A", "lora_B"))
        return keys
    prefix, flat, ends, step = SPELLINGS[spelling]
    network = known.family.in_slots if spelling == "bare" and known.family.slotted else known.family.network
    for path, rows, shape in native(plain(known, model), network.rules[::step]):
        keys |= down_up(prefix + (path.replace(".", "_") if flat else path), rows, shape, ends)
    return keys


def check(known: Case, keys: Mapping[str, Shape], model: Model, families: frozenset[str], bound: bool) -> None:
    """Each module of the model is changed once, by as many rows as it has, and every key counts."""
    found = explain(keys, model={model.component: model.shapes} if bound else None)
    assert found.family is not None
    assert set(found.family.split("|")) == families
    assert {key for entry in found.entries for key in entry.keys.values()} == keys.keys()
    assert not found.uneven
    assert {
        (entry.component, entry.path): sum(stop - start for start, stop in entry.rows)
        or keys[entry.keys.get("up") or entry.keys["diff"]][0]
        for entry in found.entries
    } == {(model.component, path): shape[0] for path, shape in plain(known, model).items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_in_canonical_names_is_of_its_family(name: str) -> None:
    known = case(name)
    for model in (model.thin for model in known.models):
        keys = file_of(known, model, "canonical")
        check(known, keys, model, model.families | model.alike, bound=False)
        check(known, keys, model, model.families | model.alike, bound=True)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_in_native_names_is_of_its_family(name: str, spelling: str) -> None:
    known = case(name)
    for model in known.denoisers:
        keys = file_of(known, model, spelling)
        check(known, keys, model, model.families, bound=False)
        check(known, keys, model, model.families, bound=True)


@pytest.mark.parametrize("spelling", ["canonical", *SPELLINGS])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_one_kind_of_module_is_never_taken_for_another_family(name: str, spelling: str) -> None:
    """It is explained as its own family, alone or among others; or it is refused, and asks which family it is."""
    known = case(name)
    for model in known.denoisers:
        for part in by_module(file_of(known, model, spelling)).values():
            families, refusal = families_of(part)
            assert known.family.name in families or "Pass family=" in refusal, part


def families_of(keys: Mapping[str, Shape]) -> tuple[list[str], str]:
    try:
        return (explain(keys).family or "").split("|"), ""
    except DiffLoRAError as error:
        return [], str(error)


def by_module(keys: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """The keys of a file, by the kind of their module."""
    files: dict[str, dict[str, Shape]] = {}
    for key, shape in keys.items():
        module = re.sub(r"\.(lora_\w+(\.default)?\.weight|diff)$", "", key)
        files.setdefault(outline(module)[0], {})[key] = shape
    return files


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


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).ambiguous])
def test_names_that_mean_two_modules_are_refused(name: str) -> None:
    known = case(name)
    for model in known.denoisers:
        for path in (parts[0] for rule in known.ambiguous for parts in layers(rule, model)):
            with pytest.raises(DiffLoRAError, match="may mean"):
                explain({f"{path}.diff": model.shapes[path]}, family=known.family.name)
