"""The rules read backwards: what a family's own code base calls canonical modules, and which it keeps as one."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from difflora.formats.layouts import DENOISER, ENCODERS
from difflora.formats.rules import Encoder, Family, Network, Rule, Table, outline
from difflora.formats.text_encoders import T5

# Families whose kohya trainer works on the diffusers model.
_OWN_NAMES = frozenset(("sd1", "sd2"))


@dataclass(frozen=True, slots=True)
class Native:
    """A module of a native network, and the canonical paths that `rule` stacks in it, in its order."""

    name: str
    rule: Rule
    sections: tuple[str, ...]


def home(family: Family, component: str, layout: str) -> tuple[str, Network] | None:
    """What `kohya` or `comfy` keys of a component begin with, and the network that names its modules.

    None where the layout has no word for the component.
    """
    flat, prior = layout == "kohya", "prior_" if family.denoiser == "prior" else ""
    denoiser = f"lora_{prior}unet_" if flat else "diffusion_model."
    if component == family.denoiser:
        return denoiser, Network() if flat and family.name in _OWN_NAMES else family.network
    for encoder in (encoder for encoder in family.encoders if encoder.component == component):
        place = _flat_place(encoder) if flat else next((p for p in encoder.places if p in ENCODERS), None)
        if DENOISER in encoder.places:
            return denoiser, encoder.network
        if place:
            return f"lora_{prior}{place}_" if flat else f"text_encoders.{place}.transformer.", Network()
    return None


def _flat_place(encoder: Encoder) -> str | None:
    """`te`, `te1`, ...: kohya calls the T5 of a family with several text encoders `te3`."""
    numbered = [place for place in encoder.places if place.startswith("te") and place[2:] in ("", *"1234")]
    return "te3" if encoder.network is T5 and "te3" in numbered else next(iter(numbered), None)


def natives(network: Network, paths: Iterable[str]) -> tuple[Native, ...]:
    """The native modules that canonical module paths are, or are rows of; a path without a rule is its own name."""
    table = Table((section, rule) for rule in network.rules for section in rule.sections)
    found: dict[str, Native] = {}
    for path in paths:
        rule, captures = next(iter(table.find(*outline(path))), (Rule(path, (path,)), {}))
        filled = (
            reduce(lambda text, one: text.replace(*one), captures.items(), p) for p in (rule.source, *rule.sections)
        )
        name, *sections = filled
        found.setdefault(name, Native(name, rule, tuple(sections)))
    return tuple(found.values())
