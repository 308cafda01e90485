"""Random adapters of every family: what is written in any layout is read back, and is never another family's alone.

The writer here is its own: it stacks the parts of fused modules and flattens names from the families' tables, and adds
up the changes by plain arithmetic.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from random import Random

import diffusers
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from difflora.formats.errors import DiffLoRAError
from difflora.formats.families import FAMILIES
from difflora.formats.layouts import ENCODERS
from difflora.formats.match import explain
from difflora.formats.rules import Family, Network, Rule, outline, sections
from difflora.loading import Raw, normalise
from difflora.types import Adapter

Shape = tuple[int, ...]
Spans = tuple[tuple[int, int], ...]
PROFILE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# Drawn from evenly: hypothesis' own choices come in clusters, which leave most families out.
RANDOM = st.randoms(use_true_random=True)
MODELS = Path(__file__).parent / "models"
# Families of which some native names are canonical names of other modules.
AMBIGUOUS = {
    data["family"] for data in map(json.loads, map(Path.read_text, MODELS.glob("*.json"))) if "ambiguous" in data
}
BY_NAME = {family.name: family for family in FAMILIES}
D = 16


@dataclass(frozen=True)
class Layout:
    """How keys are spelled: by native or canonical names, the denoiser's prefix, encoders' prefix, and the factors."""

    native: bool
    prefix: str
    down: str
    up: str
    encoder: str = ""
    flat: bool = False
    slot: bool = False

    def key(self, prefix: str, module: str) -> str:
        return prefix + (module.replace(".", "_") if self.flat else module)


DOWN_UP, A_B = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight")
LAYOUTS = {
    "kohya": Layout(True, "lora_unet_", *DOWN_UP, encoder="lora_{te}_", flat=True),
    "kohya, two underscores": Layout(True, "lora_unet__", *DOWN_UP, flat=True),
    "OneTrainer": Layout(False, "lora_transformer_", *DOWN_UP, encoder="lora_{te}_", flat=True),
    "LyCORIS": Layout(False, "lycoris_", *DOWN_UP, flat=True),
    "ComfyUI": Layout(True, "diffusion_model.", *DOWN_UP, encoder="text_encoders.{comfy}.transformer."),
    "ComfyUI, A and B": Layout(True, "diffusion_model.", *A_B),
    "bare": Layout(True, "", *A_B),
    "bare, slot": Layout(True, "", "lora_A.default.weight", "lora_B.default.weight", slot=True),
    "diffusers": Layout(False, "{component}.", *A_B, encoder="{component}."),
    "diffusers, old": Layout(False, "{component}.", "lora.down.weight", "lora.up.weight", encoder="{component}."),
    "diffusers, older": Layout(False, "{component}.", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
    "PEFT": Layout(False, "base_model.model.", *A_B),
    "PEFT, slot": Layout(False, "base_model.model.", "lora_A.a1.weight", "lora_B.a1.weight", slot=True),
}


# ---- modules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A module as a layout has it: its stem, its size, and which of its rows each canonical module is made of."""

    stem: str
    rows: int
    cols: int
    parts: Mapping[tuple[str, str], Spans]
    kernel: Shape = ()


def blocks(rule: Rule, heights: Sequence[int]) -> list[Spans]:
    """The rows of each section of a rule, told from how high they are."""
    if rule.perm:
        step = heights[0] // len(rule.perm)
        return [tuple((step * source, step * (source + 1)) for source in rule.perm)]
    if rule.heads:
        step, count = rule.heads, len(heights)
        return [tuple((at, at + step) for at in range(step * n, sum(heights), step * count)) for n in range(count)]
    edges = [sum(heights[:n]) for n in range(len(heights) + 1)]
    return [((start, stop),) for start, stop in pairwise(edges)]


def module(stem: str, component: str, rule: Rule, parts: Sequence[str], shapes: Mapping[str, Shape]) -> Module:
    heights = [shapes[part][0] for part in parts]
    spans = blocks(rule, heights) if rule.rows else [((0, heights[0]),)]
    places = {(component, part): span for part, span in zip(parts, spans, strict=True)}
    return Module(stem, sum(heights), shapes[parts[0]][1], places, shapes[parts[0]][2:])


def numbered(pattern: str, numbers: Mapping[str, str]) -> str:
    return re.sub(r"\{\w+\}", lambda found: numbers[found[0]], pattern)


def heights_of(rule: Rule) -> tuple[int, ...]:
    """How high the sections of a rule are in a small model."""
    sizes = [D if row == "D" else 2 * rule.heads or (row if isinstance(row, int) else 2 * D) for row in rule.rows]
    return (sum(sizes),) if rule.perm else tuple(sizes) or (D,)


@cache
def small(network: Network) -> tuple[dict[str, int], tuple[Rule, ...]]:
    """(the height of every canonical module, the rules that agree with these) of a network 16 wide."""
    heights: dict[str, int] = {}
    agreed = []
    for rule in sorted(network.rules, key=lambda rule: not rule.rows):
        wanted = heights_of(rule)
        if not rule.rows:
            wanted = tuple(heights.get(section, D) for section in rule.sections)
        if all(heights.get(section, height) == height for section, height in zip(rule.sections, wanted, strict=True)):
            heights.update(zip(rule.sections, wanted, strict=True))
            agreed.append(rule)
    for name in chain(network.names, sections(network.rules)):
        heights.setdefault(name, D)
    return heights, tuple(agreed)


def homes(family: Family, layout: Layout) -> Iterator[tuple[str, str, Network]]:
    """(prefix, component, network) of everything that a layout has names for."""
    denoiser = layout.prefix.format(component=family.denoiser)
    yield denoiser, family.denoiser, family.in_slots if layout.slot and family.slotted else family.network
    for encoder in family.encoders if layout.encoder else ():
        for place in encoder.places:
            words = {
                "te": place if re.fullmatch(r"te[0-9]?", place) else "",
                "comfy": place if place in ENCODERS else "",
            }
            words["component"] = place if place == encoder.component else ""
            if all(words[word] for word in re.findall(r"\{(\w+)\}", layout.encoder)):
                yield layout.encoder.format(**words), encoder.component, encoder.network


def modules(rng: Random, family: Family, layout: Layout) -> list[Module]:
    """Some modules of a small model; no canonical one twice."""
    found: dict[tuple[str, str], Module] = {}
    everywhere = list(homes(family, layout))
    for _ in range(rng.randint(1, 5)):
        prefix, component, network = rng.choice(everywhere)
        heights, rules = small(network)
        own = [Rule(name, (name,)) for name in (network.names if layout.native else heights)]
        rule = rng.choice([*rules, *own] if layout.native else own)
        numbers = {f"{{{letter}}}": str(rng.randint(0, 2)) for letter in "ijk"}
        shapes = {numbered(section, numbers): (heights[section], D) for section in rule.sections}
        stem = layout.key(prefix, numbered(rule.source, numbers))
        made = module(stem, component, rule, list(shapes), shapes)
        if made.stem not in {other.stem for other in found.values()} and found.keys().isdisjoint(made.parts):
            found |= dict.fromkeys(made.parts, made)
    return list({made.stem: made for made in found.values()}.values())


# ---- what they hold -------------------------------------------------------------------------------------------------

Change = Callable[[Tensor], Tensor]
Held = tuple[dict[str, Tensor], Change]


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def lora(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    down, up = rand(g, rank, made.cols), rand(g, made.rows, rank)
    return {layout.down: down, layout.up: up}, lambda base: scale * up @ down


def loha(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    a, b, c, d = (rand(g, *shape) for shape in 2 * ((made.rows, rank), (rank, made.cols)))
    held = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d}
    return held, lambda base: scale * (a @ b) * (c @ d)


def lokr(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    one, a, b = rand(g, 4, 2), rand(g, made.rows // 4, rank), rand(g, rank, made.cols // 2)
    return {"lokr_w1": one, "lokr_w2_a": a, "lokr_w2_b": b}, lambda base: scale * torch.kron(one, a @ b)


def whole_lokr(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    one, two = rand(g, made.rows // 8, 4), rand(g, 8, made.cols // 4)
    return {"lokr_w1": one, "lokr_w2": two}, lambda base: torch.kron(one, two)


def dora(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    held, added = lora(g, made, layout, rank, scale)
    magnitude = rand(g, made.rows, 1).abs()

    def change(base: Tensor) -> Tensor:
        adapted = base + added(base)
        return adapted / adapted.norm(dim=1, keepdim=True) * magnitude - base

    return {**held, "dora_scale": magnitude}, change


def glora(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    a1, a2, b1, b2 = (rand(g, *s) for s in ((made.cols, rank), (rank, made.cols), (made.rows, rank), (rank, made.cols)))
    held = {"a1.weight": a1, "a2.weight": a2, "b1.weight": b1, "b2.weight": b2}
    return held, lambda base: scale * (base @ a1 @ a2 + b1 @ b2)


def difference(g: torch.Generator, made: Module, layout: Layout, rank: int, scale: float) -> Held:
    value = rand(g, made.rows, made.cols)
    return {"diff": value}, lambda base: value


KINDS = (lora, loha, lokr, whole_lokr, dora, glora, difference)
ALPHAS: tuple[Callable[[float], Tensor], ...] = (
    torch.tensor,
    lambda value: torch.tensor(int(value)),
    lambda value: torch.tensor(value, dtype=torch.bfloat16),
    lambda value: torch.tensor([value]),
)


@dataclass(frozen=True)
class Written:
    """A file, what each canonical module of it adds to a base, and these bases."""

    family: str
    tensors: dict[str, Tensor]
    modules: tuple[Module, ...]
    changes: Mapping[str, Change]
    bases: Mapping[str, Tensor]
    config: str | None = None

    def wanted(self, stems: Sequence[str]) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
        """(base, change) of each canonical module that these stems are for."""
        found = {}
        for made in (made for made in self.modules if made.stem in stems):
            base, change = self.bases[made.stem], self.changes[made.stem](self.bases[made.stem])
            for place, spans in made.parts.items():
                found[place] = tuple(torch.cat([whole[a:b] for a, b in spans]) for whole in (base, change))
        return found

    def read(self, tensors: Mapping[str, Tensor]) -> Adapter:
        """The adapter, or a case to be thrown away: a name that the family's tables give two meanings."""
        try:
            return normalise(
                Raw("file", "file", tensors, {}, {"": self.config} if self.config else {}), family=self.family
            )
        except DiffLoRAError as error:
            if self.family not in AMBIGUOUS or "may mean" not in str(error):
                raise
            assume(False)
            raise


def written(rng: Random, layout: Layout) -> Written:
    slotted = [family for family in FAMILIES if layout.slot and family.slotted]
    family = rng.choice([*FAMILIES, *slotted * 8])
    made = modules(rng, family, layout)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    config = rng.choice([None, (2, 3.0), (4, 8.0)]) if layout.prefix.startswith("base_model") else None
    tensors: dict[str, Tensor] = {}
    changes, bases = {}, {}
    for one in made:
        kind = lora if config or layout.slot else rng.choice(KINDS)
        rank = config[0] if config else rng.randint(1, 5)
        alpha, stored = rng.choice([1.0, 2.0, 3.0, 16.0]), rng.choice([None, *ALPHAS])
        if config or stored is None:
            alpha = config[1] if config else float(rank)
        held, changes[one.stem] = kind(generator, one, layout, rank, alpha / rank)
        tensors |= {f"{one.stem}.{name}": tensor for name, tensor in held.items()}
        if stored is not None and not config:
            tensors[f"{one.stem}.alpha"] = stored(alpha)
        bases[one.stem] = rand(generator, one.rows, one.cols)
    text = json.dumps({"peft_type": "LORA", "r": config[0], "lora_alpha": config[1]}) if config else None
    return Written(family.name, tensors, tuple(made), changes, bases, text)


def check(adapter: Adapter, wanted: Mapping[tuple[str, str], tuple[Tensor, Tensor]]) -> None:
    found = {(c, path): delta for c, deltas in adapter.components.items() for path, delta in deltas.items()}
    assert found.keys() == wanted.keys()
    assert not adapter.uneven
    for place, (base, change) in wanted.items():
        torch.testing.assert_close(found[place].dense(base).reshape(change.shape), change, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_is_read_back(name: str) -> None:
    @settings(PROFILE, max_examples=100)
    @given(RANDOM)
    def holds(rng: Random) -> None:
        file = written(rng, LAYOUTS[name])
        stems = [made.stem for made in file.modules]
        check(file.read(file.tensors), file.wanted(stems))
        shuffled = rng.sample(list(file.tensors), len(file.tensors))
        check(file.read({key: file.tensors[key] for key in shuffled}), file.wanted(stems))
        kept = rng.sample(stems, rng.randint(1, len(stems)))
        part = {key: t for key, t in file.tensors.items() if any(key.startswith(f"{stem}.") for stem in kept)}
        check(file.read(part), file.wanted(kept))

    holds()


# ---- whose file it is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A published model of a family, reduced to the first two layers and the last of each kind of module."""

    family: Family
    component: str
    shapes: Mapping[str, Shape]


@cache
def published() -> tuple[Known, ...]:
    """The models of every family that has some, and those modules of the others whose widths are published."""
    found = []
    for path in sorted(MODELS.glob("*.json")):
        data = json.loads(path.read_text())
        for entry in data["models"]:
            with torch.device("meta"):
                model = getattr(diffusers, entry["class"]).from_config(entry["config"])
            shapes = {
                key.removesuffix(".weight"): tuple(value.shape)
                for key, value in model.named_parameters()
                if key.endswith(".weight") and value.ndim > 1
            }
            found.append(Known(BY_NAME[data["family"]], entry["component"], thin(shapes)))
    families = {known.family.name for known in found}
    return (*found, *(from_widths(family) for family in FAMILIES if family.name not in families))


def thin(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    kinds: dict[str, list[str]] = {}
    for path in shapes:
        kinds.setdefault(outline(path)[0], []).append(path)
    kept = {path for paths in kinds.values() for path in (*paths[:2], paths[-1])}
    return {path: shape for path, shape in shapes.items() if path in kept}


def from_widths(family: Family) -> Known:
    layers = [dict.fromkeys(("{i}", "{j}", "{k}"), number) for number in "01"]
    sizes = {
        numbered(path, numbers): tuple(size[0] if isinstance(size, tuple) else size for size in widths)
        for name, widths in family.widths.items()
        for component, _, path in [name.partition(".")]
        for numbers in layers
        if component == family.denoiser
    }
    whole = {path: size for path, size in sizes.items() if None not in size}
    return Known(family, family.denoiser, whole)


def spelled(known: Known, layout: Layout) -> list[Module]:
    """Every module of a model as a layout has it, fused where the layout's names are native."""
    network = known.family.in_slots if layout.slot and known.family.slotted else known.family.network
    prefix = layout.prefix.format(component=known.component)
    left = dict.fromkeys(known.shapes)
    found = []
    for rule in network.rules if layout.native and known.component == known.family.denoiser else ():
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(rule.sections[0]))
        for match in filter(None, (re.fullmatch(pattern, path) for path in list(left))):
            numbers = {f"{{{name}}}": number for name, number in match.groupdict().items()}
            parts = [numbered(section, numbers) for section in rule.sections]
            if all(part in left for part in parts):
                fitting = fits(rule, [known.shapes[part] for part in parts])
                if not fitting and not rule.whole:
                    continue
                stem = layout.key(prefix, numbered(rule.source, numbers))
                meaning = rule if fitting else Rule(rule.source, rule.sections)
                found.append(module(stem, known.component, meaning, parts, known.shapes))
                for part in parts:
                    del left[part]
    return found + [
        module(layout.key(prefix, path), known.component, Rule(path, (path,)), [path], known.shapes) for path in left
    ]


def fits(rule: Rule, shapes: Sequence[Shape]) -> bool:
    """Whether the heights of the parts are what the rule says."""
    if not rule.rows or rule.heads:
        return True
    width = {"D": shapes[0][1]}
    if rule.perm:
        return "D" not in rule.rows or shapes[0][0] == width["D"] * len(rule.rows)
    named: dict[str | int, int] = {}
    return all(
        shape[0] == (row if isinstance(row, int) else width.get(row) or named.setdefault(row, shape[0]))
        for row, shape in zip(rule.rows, shapes, strict=True)
    )


def listed(made: Sequence[Module], layout: Layout) -> dict[str, Shape]:
    """Keys and shapes of plain LoRA for these modules."""
    found: dict[str, Shape] = {}
    for one in made:
        found[f"{one.stem}.{layout.down}"] = (4, one.cols, *one.kernel)
        found[f"{one.stem}.{layout.up}"] = (one.rows, 4, *(1 for _ in one.kernel))
    return found


def meant(made: Sequence[Module]) -> dict[tuple[str, str], Spans]:
    """Each canonical module with its row blocks, joined where they touch; all rows in order are no blocks."""
    return {place: () if spans == ((0, one.rows),) else spans for one in made for place, spans in one.parts.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_is_never_another_familys_alone(name: str) -> None:
    """Without a model its family is among those named, or the refusal asks for it; beside its model it is right."""
    layout = LAYOUTS[name]
    models = [known for known in published() if known.component == known.family.denoiser]

    @settings(PROFILE, max_examples=120)
    @given(RANDOM)
    def holds(rng: Random) -> None:
        known = rng.choice(models)
        every = spelled(known, layout)
        made = rng.sample(every, min(rng.randint(1, 8), len(every)))
        keys, wanted = listed(made, layout), meant(made)
        for model in (None, {known.component: known.shapes}):
            try:
                found = explain(keys, model=model)
            except DiffLoRAError as error:
                asked = model is None and "Pass family=" in str(error)
                if not asked and not (known.family.name in AMBIGUOUS and "may mean" in str(error)):
                    raise
                continue
            assert known.family.name in (found.family or "").split("|"), (known.family.name, found.family, keys)
            assert {(entry.component, entry.path): entry.rows for entry in found.entries} == wanted

    holds()
