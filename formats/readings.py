"""What the modules of a file mean, family by family: entries, or what stands in the way of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from difflora.formats.errors import some
from difflora.formats.kinds import INPUT_SIDE
from difflora.formats.layouts import COMPONENTS, DENOISER
from difflora.formats.rules import Entry, Family, Network, Rule, Span
from difflora.formats.stems import Stem
from difflora.formats.text_encoders import canonical
from difflora.formats.vocabulary import Vocabulary


@dataclass(slots=True)
class Reading:
    """What a file means if it belongs to `family`; None takes its names as those of the model's modules.

    `misfits` are names with several meanings, `uneven` modules whose rows are not those of their parts.
    """

    family: Family | None
    modules: list[tuple[Entry, Stem]] = field(default_factory=list)
    unexplained: list[Stem] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    renamed: bool = False

    @property
    def name(self) -> str:
        return self.family.name if self.family else "the model"

    @property
    def named(self) -> bool:
        return not self.unexplained and not self.misfits

    @property
    def whole(self) -> bool:
        return self.named and not self.uneven

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(sorted((entry for entry, _ in self.modules), key=lambda entry: (entry.component, entry.path)))

    def missing(self, vocabulary: Vocabulary | None) -> int:
        """How many entries the model has no module for."""
        return sum(not vocabulary.holds(entry.component, entry.path) for entry, _ in self.modules) if vocabulary else 0


def by_family(family: Family, stems: Sequence[Stem]) -> Reading:
    reading = Reading(family)
    for stem in stems:
        found = [
            (component, sections, rule)
            for component, network in _networks(family, stem)
            for sections, rule in network.find(*stem.outline, stem.flat).items()
        ]
        reading.renamed |= any(c == family.denoiser and rule.source not in rule.sections for c, _, rule in found)
        fitting = [(*meaning, spans) for meaning in found if (spans := _spans(stem, meaning[2])) is not None]
        if not found:
            reading.unexplained.append(stem)
        elif not fitting:
            component, sections, rule = found[0]
            columns = f" with D = {stem.cols}" if stem.cols else ""
            reading.uneven.append(
                f"{stem} makes {stem.rows} rows, which are not {' + '.join(map(str, rule.rows))}{columns}"
            )
            reading.modules += [(_entry(component, path, stem), stem) for path in sections]
        elif len(fitting) > 1:
            reading.misfits.append(f"{stem} may mean {some(sections[0] for _, sections, *_ in fitting)}")
        else:
            component, sections, _, spans = fitting[0]
            for path, rows in zip(sections, spans, strict=True):
                reading.modules.append((_entry(component, path, stem, rows), stem))
    return reading


def _networks(family: Family, stem: Stem) -> Iterator[tuple[str, Network]]:
    """The components of a family that the place of a stem may mean, and their modules."""
    if stem.place in (DENOISER, family.denoiser, *family.experts):
        component = stem.place if stem.place in family.experts else family.denoiser
        yield component, family.in_slots if stem.slotted and family.slotted else family.network
    for encoder in family.encoders:
        if stem.place in encoder.places:
            yield encoder.component, encoder.network


def _spans(stem: Stem, rule: Rule) -> tuple[tuple[Span, ...], ...] | None:
    spans = rule.spans(stem.rows, stem.cols)
    return ((),) * len(rule.sections) if spans is None and stem.kind in INPUT_SIDE else spans


def _entry(component: str, path: str, stem: Stem, rows: tuple[Span, ...] = ()) -> Entry:
    return Entry(component, f"{path}.bias" if stem.bias else path, stem.kind, stem.keys, rows)


def by_model(stems: Sequence[Stem], vocabulary: Vocabulary) -> Reading:
    """The stems as names, dotted or flattened, of the model's own modules."""
    reading = Reading(None)
    for stem in stems:
        found = vocabulary.find(stem)
        if not found:
            reading.unexplained.append(stem)
        elif len(found) > 1:
            named = some(f"{component}.{path}" for component, path in found)
            reading.misfits.append(f"{stem} may mean {named} of the model")
        else:
            reading.modules.append((_entry(*found[0], stem), stem))
    return reading


def literal(stems: Sequence[Stem]) -> bool:
    """Whether every key names its component and its module outright, so that no table is needed to read it."""
    return all(stem.place in COMPONENTS and not stem.flat for stem in stems)


def as_written(stems: Sequence[Stem], readings: Sequence[Reading]) -> Reading:
    closest = min(readings, key=lambda reading: len(reading.unexplained))
    note = f"of no known family ({closest.name} lacks {some(closest.unexplained)}); module names kept as written"
    modules = [(_entry(stem.place, canonical(stem.place, stem.path), stem), stem) for stem in stems]
    return Reading(None, modules, notes=(note,))
