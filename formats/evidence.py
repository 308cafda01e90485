"""What tells apart the families that explain a file: the model, published widths, metadata, depths, in this order."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from difflora.formats.kinds import Shape
from difflora.formats.readings import Reading
from difflora.formats.rules import Family, Width, outline
from difflora.formats.vocabulary import Vocabulary

_METADATA = ("modelspec.architecture", "ss_base_model_version")
# What our own files say: names of families, joined by bars.
FAMILY = "difflora.family"


def narrowed(readings: list[Reading], vocabulary: Vocabulary | None, metadata: Mapping[str, str]) -> list[Reading]:
    """The readings that each kind of evidence in turn speaks for; all of them where it speaks for none."""
    said = [metadata.get(name, "").lower() for name in _METADATA]
    own = metadata.get(FAMILY, "").split("|")
    tests: tuple[Callable[[Family, Reading], bool], ...] = (
        lambda family, _: vocabulary is not None and _knows(family, vocabulary),
        lambda family, reading: _published(family, _sizes(reading, vocabulary)),
        lambda family, _: family.name in own,
        lambda family, _: any(text.startswith(family.marks) for text in said),
        _filled,
    )
    for test in tests:
        if len(readings) > 1:
            readings = [reading for reading in readings if reading.family and test(reading.family, reading)] or readings
    return readings


def _knows(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether the family has a name for every module of the model's denoiser."""
    modules = vocabulary.shapes.get(family.denoiser, {})
    return bool(modules) and all(family.network.find(*outline(path), flat=False) for path in modules)


def _filled(family: Family, reading: Reading) -> bool:
    """Whether the last layer that the file names is the family's last, wherever the number of layers is published."""
    last: dict[str, int] = {}
    for entry in reading.entries:
        for start in family.depths:
            if entry.component == family.denoiser and entry.path.startswith(start):
                last[start] = max(last.get(start, 0), int(entry.path[len(start) :].split(".")[0]))
    return bool(last) and all(family.depths[start] == number + 1 for start, number in last.items())


def _published(family: Family, sizes: Iterable[tuple[str, Shape]]) -> bool:
    """Whether at least one module has a published width and none has another."""
    agreed = False
    for name, size in sizes:
        for published, _ in family.published.find(*outline(name)):
            if not all(_allows(want, have) for want, have in zip(published, size, strict=False)):
                return False
            agreed = True
    return agreed


def _allows(want: Width, have: int) -> bool:
    return want is None or have in (want if isinstance(want, tuple) else (want,))


def _sizes(reading: Reading, vocabulary: Vocabulary | None) -> Iterator[tuple[str, Shape]]:
    """(rows, columns) by `component.path`, of the model's modules or else of the file's."""
    if vocabulary:
        for component, modules in vocabulary.shapes.items():
            yield from ((f"{component}.{path}", shape[:2]) for path, shape in modules.items())
        return
    for entry, stem in reading.modules:
        rows = sum(stop - start for start, stop in entry.rows) or stem.rows
        yield f"{entry.component}.{entry.path}", (rows, stem.cols)
