"""The families' native names against diffusers' own converters of checkpoints: each row must go where they put it."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from published import NAMES, Case, case, instances

from difflora.formats.kinds import Shape
from difflora.formats.rules import Rule

CONVERTERS = {
    **{name: f"convert_{name}_transformer_checkpoint_to_diffusers" for name in NAMES},
    **{name: f"convert_{name}_transformer_to_diffusers" for name in ("hunyuan_video", "sana", "wan", "hidream")},
    "cosmos2": "convert_cosmos_transformer_checkpoint_to_diffusers",
    "ltx2": "convert_ltx2_transformer_to_diffusers",
    "lumina2": "convert_lumina2_to_diffusers",
}
_EMBEDDER = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
# What a model has and its converter leaves out; Mochi's takes no other number of layers than 48.
UNKNOWN = {
    "ltx2": [f"{prompt}.{name}" for prompt in ("audio_prompt_adaln", "prompt_adaln") for name in _EMBEDDER],
    "mochi": ["transformer_blocks.1.norm1_context.linear_1"],
    "sana": [
        *(f"time_embed.{kind}_embedder.linear_{n}" for kind in ("guidance", "timestep") for n in (1, 2)),
        *(f"transformer_blocks.{i}.attn{n}.norm_{name}" for i in (0, 1) for n in (1, 2) for name in "qk"),
    ],
    "wan": ["condition_embedder.image_embedder.pos_embed", "fps_projection.net.0.proj", "fps_projection.net.2"],
}
CONVERTED = [name for name, converter in CONVERTERS.items() if hasattr(single_file_utils, converter)]
STEP = 1 << 20  # more rows than any module has
LAYER = re.compile(r"^(.*?(?:blocks|layers|norms|refiner|image|image_cond)\.)([0-9]+)(?![^.])")


class Checkpoint(dict[str, torch.Tensor]):
    """A state dict that has zeros for what else a converter asks for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.rows = {key.replace(".weight", ".bias"): len(tensor) for key, tensor in tensors.items()}
        self.once = frozenset(tensors)

    def __contains__(self, key: object) -> bool:
        """Whether the key was there in the first place: the converter of Cosmos looks after it has taken all."""
        return key in self.once

    def pop(self, key: str, *default: Any) -> Any:
        if super().__contains__(key) or default:
            return super().pop(key, *default)
        return torch.zeros(self.rows.get(key, 96), 1)


def first_and_last(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The first layer of each stack, and the last, numbered 1: converters count layers by their numbers."""
    matches = {path: LAYER.match(path) for path in shapes}
    last = {match[1]: int(match[2]) for match in matches.values() if match}
    found = {}
    for path, match in matches.items():
        if not match or match[2] == "0":
            found[path] = shapes[path]
        elif int(match[2]) == last[match[1]]:
            found[f"{match[1]}1{path[match.end(2) :]}"] = shapes[path]
    return found


def fed(known: Case, shapes: Mapping[str, Shape]) -> list[tuple[str, tuple[str, ...], Rule]]:
    """(native name, its sections, the rule) of every module, in each of its spellings."""
    names = [(source, parts, rule) for rule in known.family.network.rules for source, parts in instances(rule, shapes)]
    named = {part for _, parts, _ in names for part in parts}
    kept = [path for path in shapes if path not in named]
    return names + [(path, (path,), Rule(path, (path,))) for path in kept]


def marks(number: int, rows: int) -> torch.Tensor:
    return (number + 1) * STEP + torch.arange(rows)[:, None]


@pytest.mark.parametrize("name", CONVERTED)
def test_rows_go_where_the_converter_puts_them(name: str) -> None:
    known = case(name)
    for model in (model for model in known.models if model.component == known.family.denoiser):
        shapes = first_and_last(model.shapes)
        ends = first_and_last(dict.fromkeys(model.parameters, ()))
        names = fed(known, shapes)
        prefix = "net." if name == "cosmos" else ""
        marked = {
            f"{prefix}{source}{end}": marks(n, sum(shapes[part][0] for part in parts))
            for n, (source, parts, _) in enumerate(names)
            for end in (
                [""] if parts[0] in ends else [".weight"] if len(shapes[parts[0]]) > 1 else [".weight", ".scale"]
            )
        }
        converted = getattr(single_file_utils, CONVERTERS[name])(Checkpoint(marked), config={})
        placed = set()
        for path in shapes:
            tensor = converted.get(path if path in ends else f"{path}.weight")
            if tensor is None or not int(tensor.flatten()[0]) // STEP:
                continue
            source, parts, rule = names[int(tensor[0, 0]) // STEP - 1]
            rows = tensor[:, 0] % STEP
            spans = rule.spans(sum(shapes[part][0] for part in parts), [*shapes[parts[0]], 0][1])
            assert path in parts, (path, source)
            assert spans is not None
            blocks = spans[parts.index(path)] or ((0, shapes[path][0]),)
            assert torch.equal(rows, torch.cat([torch.arange(*block) for block in blocks])), (path, source)
            placed.add(path)
        assert shapes.keys() - placed <= set(UNKNOWN.get(name, ()))
