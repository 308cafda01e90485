"""Which family and which modules the keys of a file mean.  Matching is detecting: a family that explains all is it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.families import FAMILIES
from difflora.formats.layouts import COMPONENTS, DENOISER
from difflora.formats.rules import Entry, Explanation, Family, Network, Rule, outline
from difflora.formats.stems import Shape, Stem, read
from difflora.formats.text_encoders import canonical
from difflora.formats.vocabulary import Vocabulary

_METADATA = ("modelspec.architecture", "ss_base_model_version")


@dataclass(slots=True)
class _Reading:
    """What a file means if it belongs to `family`; None takes its names as those of the model's modules."""

    family: Family | None
    modules: list[tuple[Entry, Stem]] = field(default_factory=list)
    unexplained: list[Stem] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    renamed: bool = False

    @property
    def whole(self) -> bool:
        return not self.unexplained and not self.misfits

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(sorted((entry for entry, _ in self.modules), key=lambda entry: (entry.component, entry.path)))

    def missing(self, vocabulary: Vocabulary | None) -> int:
        """How many entries the model has no module for."""
        return sum(not vocabulary.holds(entry.component, entry.path) for entry, _ in self.modules) if vocabulary else 0


def explain(
    shapes: Mapping[str, Shape],
    *,
    source: str = "the state dict",
    metadata: Mapping[str, str] | None = None,
    model: Mapping[str, Mapping[str, Shape]] | None = None,
    family: str | None = None,
) -> Explanation:
    """The meaning of every key of a file, from names and shapes alone.

    `model` gives the components of the pipeline to bind to, as {module path: weight shape}; `family` is the user's
    choice.  Evidence counts in this order: the model, names, relations between shapes, published widths, metadata.
    """
    stems, notes = read(shapes, source, model or ())
    vocabulary = Vocabulary(model) if model else None
    readings = _by_names(stems, family, vocabulary, source)
    readings = _narrowed(readings, vocabulary, metadata or {})
    _agreed(readings, source)
    _distinct(readings[0], source)
    names = [reading.family.name for reading in readings if reading.family]
    layout = "+".join(sorted({stem.layout for stem in stems}))
    return Explanation(layout, "|".join(names) or None, readings[0].entries, (*notes, *readings[0].notes))


def _by_names(stems: Sequence[Stem], family: str | None, vocabulary: Vocabulary | None, source: str) -> list[_Reading]:
    """The readings that explain every stem and that the model contradicts least; raises when there is none."""
    readings = [_by_family(candidate, stems) for candidate in _chosen(family, source)]
    whole = [reading for reading in readings if reading.whole]
    missing = [reading.missing(vocabulary) for reading in whole]
    whole = [reading for reading, count in zip(whole, missing, strict=True) if count == min(missing)]
    if whole and not min(missing):
        return whole
    own = _by_model(stems, vocabulary) if vocabulary and family is None else None
    if own and own.whole:
        return [own]
    if whole:
        return whole
    if family is None and _literal(stems) and not any(reading.renamed for reading in readings):
        return [_as_written(stems, readings)]
    raise DiffLoRAError(f"{source}: {_shortfall(readings, own, len(stems))}")


def _chosen(family: str | None, source: str) -> list[Family]:
    if family is None:
        return list(FAMILIES)
    wanted = family.split("|")
    known = {candidate.name: candidate for candidate in FAMILIES}
    if not set(wanted) <= known.keys():
        raise DiffLoRAError(f"{source}: family={family!r} is not known. Expected one of {', '.join(known)}.")
    return [known[name] for name in wanted]


def _by_family(family: Family, stems: Sequence[Stem]) -> _Reading:
    reading = _Reading(family)
    for stem in stems:
        found = [
            (component, sections, rule)
            for component, network in _networks(family, stem.place)
            for sections, rule in network.find(*stem.outline, stem.flat).items()
        ]
        if not found:
            reading.unexplained.append(stem)
        elif len(found) > 1:
            reading.misfits.append(f"{stem} may mean {some(sections[0] for _, sections, _ in found)}")
        else:
            component, sections, rule = found[0]
            reading.renamed |= component == family.denoiser and rule.source not in rule.sections
            _add(reading, stem, component, sections, rule)
    return reading


def _networks(family: Family, place: str) -> Iterator[tuple[str, Network]]:
    """The components of a family that a place of a file may mean, and their modules."""
    if place in (DENOISER, family.denoiser):
        yield family.denoiser, family.network
    for encoder in family.encoders:
        if place in encoder.places:
            yield encoder.component, encoder.network


def _add(reading: _Reading, stem: Stem, component: str, sections: tuple[str, ...], rule: Rule) -> None:
    spans = rule.spans(stem.rows, stem.cols)
    if spans is None:
        expected = " + ".join(map(str, rule.rows))
        reading.misfits.append(f"{stem} makes {stem.rows} rows, which are not {expected} with D = {stem.cols}")
        return
    for path, rows in zip(sections, spans, strict=True):
        reading.modules.append((Entry(component, path, stem.kind, stem.keys, rows), stem))


def _by_model(stems: Sequence[Stem], vocabulary: Vocabulary) -> _Reading:
    """The stems as names, dotted or flattened, of the model's own modules."""
    reading = _Reading(None)
    for stem in stems:
        found = vocabulary.find(stem)
        if not found:
            reading.unexplained.append(stem)
        elif len(found) > 1:
            named = some(f"{component}.{path}" for component, path in found)
            reading.misfits.append(f"{stem} may mean {named} of the model; name the component or the family")
        else:
            reading.modules.append((Entry(*found[0], stem.kind, stem.keys), stem))
    return reading


def _literal(stems: Sequence[Stem]) -> bool:
    """Whether every key names its component and its module outright, so that no table is needed to read it."""
    return all(stem.place in COMPONENTS and not stem.flat for stem in stems)


def _as_written(stems: Sequence[Stem], readings: Sequence[_Reading]) -> _Reading:
    closest = min(readings, key=lambda reading: len(reading.unexplained))
    note = f"of no known family ({_name(closest)} lacks {some(closest.unexplained)}); module names kept as written"
    modules = [(Entry(stem.place, canonical(stem.place, stem.path), stem.kind, stem.keys), stem) for stem in stems]
    return _Reading(None, modules, notes=(note,))


def _narrowed(readings: list[_Reading], vocabulary: Vocabulary | None, metadata: Mapping[str, str]) -> list[_Reading]:
    """The readings that each kind of evidence in turn speaks for; all of them where it speaks for none."""
    said = [metadata.get(name, "").lower() for name in _METADATA]
    tests: tuple[Callable[[Family, _Reading], bool], ...] = (
        lambda family, _: vocabulary is not None and _knows(family, vocabulary),
        lambda family, reading: _published(family, _sizes(reading, vocabulary)),
        lambda family, _: any(text.startswith(family.marks) for text in said),
    )
    for test in tests:
        if len(readings) > 1:
            readings = [reading for reading in readings if reading.family and test(reading.family, reading)] or readings
    return readings


def _knows(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether the family has a name for every module of the model's denoiser."""
    modules = vocabulary.shapes.get(family.denoiser, {})
    return bool(modules) and all(family.network.find(*outline(path), flat=False) for path in modules)


def _published(family: Family, sizes: Iterable[tuple[str, Shape]]) -> bool:
    """Whether at least one module has a published width and none has another."""
    agreed = False
    for name, size in sizes:
        for published, _ in family.published.find(*outline(name)):
            if any(want not in (None, have) for want, have in zip(published, size, strict=False)):
                return False
            agreed = True
    return agreed


def _sizes(reading: _Reading, vocabulary: Vocabulary | None) -> Iterator[tuple[str, Shape]]:
    """(rows, columns) by `component.path`, of the model's modules or else of the file's."""
    if vocabulary:
        for component, modules in vocabulary.shapes.items():
            yield from ((f"{component}.{path}", shape[:2]) for path, shape in modules.items())
        return
    for entry, stem in reading.modules:
        rows = sum(stop - start for start, stop in entry.rows) or stem.rows
        yield f"{entry.component}.{entry.path}", (rows, stem.cols)


def _agreed(readings: Sequence[_Reading], source: str) -> None:
    """Raises where the remaining families disagree about the modules that the file changes."""
    first, *others = readings
    for other in others:
        if other.entries != first.entries:
            mine, theirs = next(pair for pair in zip(first.entries, other.entries, strict=False) if pair[0] != pair[1])
            raise DiffLoRAError(
                f"{source} fits {_name(first)} and {_name(other)}, which place it differently ({mine.keys['down']} is "
                f"{mine.component}.{mine.path} or {theirs.component}.{theirs.path}). Pass family={_name(first)!r} or "
                f"family={_name(other)!r}."
            )


def _distinct(reading: _Reading, source: str) -> None:
    seen: dict[tuple[str, str], Stem] = {}
    for entry, stem in reading.modules:
        other = seen.setdefault((entry.component, entry.path), stem)
        if other is not stem:
            raise DiffLoRAError(
                f"{source}: {other} and {stem} both change {entry.component}.{entry.path}. Expected one spelling of "
                "each module; remove one of the two."
            )


def _shortfall(readings: Sequence[_Reading], own: _Reading | None, total: int) -> str:
    """Why no reading explains a file: what is wrong with the best one, and how far the runner-up comes."""
    best, *rest = sorted(readings, key=lambda reading: len(reading.unexplained))
    for reading in (best, own):
        if reading and not reading.unexplained:
            return f"{some(reading.misfits)}."
    lacking = len(best.unexplained)
    text = f"{_name(best)} comes closest and lacks {lacking} of its {total} modules ({some(best.unexplained)})"
    if lacking == total:
        text = f"no known family has any of its modules ({some(best.unexplained)})"
    elif rest:
        text += f", then {_name(rest[0])}, which lacks {len(rest[0].unexplained)}"
    if own:
        return (
            f"{text}; the model lacks {len(own.unexplained)} ({some(own.unexplained)}). Expected one that has them all."
        )
    return f"{text}. Expected a family that has them all; a file for another architecture is read with its pipeline."


def _name(reading: _Reading) -> str:
    return reading.family.name if reading.family else "the model"
