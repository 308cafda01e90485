"""Which family and which modules the keys of a file mean.  Matching is detecting: a family that explains all is it."""

from collections.abc import Iterator, Mapping, Sequence

from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.evidence import narrowed
from difflora.formats.families import FAMILIES
from difflora.formats.kinds import Shape
from difflora.formats.readings import Reading, as_written, by_family, by_model, literal
from difflora.formats.rules import Explanation, Family
from difflora.formats.stems import Stem, Vector, read
from difflora.formats.vocabulary import Vocabulary


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
    file = read(shapes, source, model or ())
    stems = file.stems
    vocabulary = Vocabulary(model) if model else None
    readings = _by_names(stems, family, vocabulary, source)
    readings = narrowed(readings, vocabulary, metadata or {})
    _agreed(readings, source)
    _distinct(readings[0], source)
    names = [reading.family.name for reading in readings if reading.family]
    layout = "+".join(sorted({stem.layout for stem in stems}))
    return Explanation(
        layout,
        "|".join(names) or None,
        readings[0].entries,
        (*file.notes, *readings[0].notes),
        tuple(_vector(vector, readings, source) for vector in file.vectors),
        tuple(sorted({place for reading in readings for place in _widened(reading)})),
        tuple(readings[0].uneven),
    )


def _vector(vector: Vector, readings: Sequence[Reading], source: str) -> tuple[str, str, str]:
    """(word, component, key) of textual-inversion vectors: the one encoder that their place means."""
    encoders = readings[0].family.encoders if readings[0].family else ()
    components = [e.component for e in encoders if vector.place in e.places]
    if len(components) != 1:
        raise DiffLoRAError(
            f"{source}: the vectors {vector.key} are for the text encoder {vector.place!r}, of which "
            f"{readings[0].name} has {some(components) or 'none'}. Pass family=, or remove them."
        )
    return vector.token, components[0], vector.key


def _widened(reading: Reading) -> Iterator[tuple[str, str]]:
    family = reading.family
    for entry in reading.entries:
        if family and entry.component == family.denoiser and entry.path in family.widens:
            yield entry.component, entry.path


def _by_names(stems: Sequence[Stem], family: str | None, vocabulary: Vocabulary | None, source: str) -> list[Reading]:
    """The readings that explain every stem and that the model contradicts least; raises when there is none."""
    readings = [by_family(candidate, stems) for candidate in _chosen(family, source)]
    whole = [reading for reading in readings if reading.whole] or [r for r in readings if r.named]
    missing = [reading.missing(vocabulary) for reading in whole]
    whole = [reading for reading, count in zip(whole, missing, strict=True) if count == min(missing)]
    whole = [reading for reading in whole if len(reading.uneven) == min(len(other.uneven) for other in whole)]
    if whole and not min(missing):
        return whole
    own = by_model(stems, vocabulary) if vocabulary and family is None else None
    if own and own.whole:
        return [own]
    if whole:
        return whole
    if family is None and literal(stems) and not any(reading.renamed for reading in readings):
        return [as_written(stems, readings)]
    fitting = [] if family is None else [one for one in (by_family(f, stems) for f in FAMILIES) if one.whole]
    instead = f" It fits {some(one.name for one in fitting)}." if fitting else ""
    raise DiffLoRAError(f"{source}: {_shortfall(readings, own, len(stems))}{instead}")


def _chosen(family: str | None, source: str) -> list[Family]:
    if family is None:
        return list(FAMILIES)
    wanted = str(family).split("|")
    known = {candidate.name: candidate for candidate in FAMILIES}
    if not set(wanted) <= known.keys():
        raise DiffLoRAError(f"{source}: family={family!r} is not known. Expected one of {', '.join(known)}.")
    return [known[name] for name in wanted]


def _agreed(readings: Sequence[Reading], source: str) -> None:
    """Raises where the remaining families disagree about the modules that the file changes."""
    first, *others = readings
    for other in others:
        if other.entries != first.entries:
            mine, theirs = next(pair for pair in zip(first.entries, other.entries, strict=False) if pair[0] != pair[1])
            key = next(iter(mine.keys.values()))
            raise DiffLoRAError(
                f"{source} fits {first.name} and {other.name}, which place it differently ({key} is "
                f"{mine.component}.{mine.path} or {theirs.component}.{theirs.path}). Pass family={first.name!r} or "
                f"family={other.name!r}."
            )


def _distinct(reading: Reading, source: str) -> None:
    seen: dict[tuple[str, str], Stem] = {}
    for entry, stem in reading.modules:
        other = seen.setdefault((entry.component, entry.path), stem)
        if other is not stem:
            raise DiffLoRAError(
                f"{source}: {other} and {stem} both change {entry.component}.{entry.path}. Expected one spelling of "
                "each module; remove one of the two."
            )


def _shortfall(readings: Sequence[Reading], own: Reading | None, total: int) -> str:
    """Why no reading explains a file: what is wrong with the best one, and how far the runner-up comes."""
    best, *rest = sorted(readings, key=lambda reading: len(reading.unexplained))
    if not best.unexplained:
        return f"{some(best.misfits)}. The file is damaged, or not of family {best.name}."
    if own and not own.unexplained:
        return f"{some(own.misfits)}. Name the component in the keys, or pass family=."
    lacking, keys = len(best.unexplained), some((own or best).unexplained)
    text = f"{best.name} comes closest and lacks {lacking} of its {total} modules"
    if lacking == total:
        text = "no known family has any of its modules"
    elif rest:
        text += f", then {rest[0].name}, which lacks {len(rest[0].unexplained)}"
    if own:
        return f"{text}, and the model lacks {len(own.unexplained)}: {keys}. Expected one that has them all."
    return f"{text}: {keys}. Expected one that has them all; a file for another architecture is read with its pipeline."
