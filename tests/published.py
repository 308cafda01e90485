"""The families' models, built from published configurations on the meta device at full size, and files for them.

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
import torch

from difflora.formats.families import FAMILIES
from difflora.formats.kinds import Shape
from difflora.formats.rules import Family, Network, Rule, outline

MODELS = Path(__file__).parent / "formats" / "models"
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

    `parameters` are the paths that are parameters, `alike` further families where the file has canonical names.
    """

    component: str
    shapes: dict[str, Shape]
    parameters: frozenset[str]
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
            *modules(entry["class"], entry["config"]),
            frozenset((data["family"], *entry.get("shares", ()))),
            frozenset(entry.get("alike", ())),
        )
        for entry in data["models"]
    )
    ambiguous = tuple(Rule("", (path,)) for path in data.get("ambiguous", ()))
    return Case(BY_NAME[data["family"]], models, tuple(data.get("spare", ())), ambiguous)


def modules(name: str, config: dict[str, Any]) -> tuple[dict[str, Shape], frozenset[str]]:
    """The shapes of a model's modules and parameters, and which of these are parameters."""
    with torch.device("meta"):
        model = model_class(name).from_config(config)
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    found = {key.removesuffix(".weight"): shape for key, shape in shapes.items() if not key.endswith(".bias")}
    return found, frozenset(found.keys() & shapes.keys())


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


def layers(rule: Rule, model: Model) -> Iterator[tuple[str, ...]]:
    return (parts for _, parts in instances(rule, model.shapes))


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
