"""The model to bind to, as a vocabulary: what a file may call its modules when no family knows them."""

from collections.abc import Iterable, Mapping

from difflora.formats.kinds import Shape
from difflora.formats.layouts import DENOISER
from difflora.formats.stems import Stem
from difflora.formats.text_encoders import canonical

_SHORTENED = "text_model."


class Vocabulary:
    """The modules of a model: `shapes[component][canonical path]`, and how a stem finds them."""

    def __init__(self, model: Mapping[str, Mapping[str, Shape]]) -> None:
        self.shapes = {
            component: {canonical(component, path): shape for path, shape in modules.items()}
            for component, modules in model.items()
        }
        self._spelled: dict[tuple[str, bool], dict[str, set[str]]] = {}

    def holds(self, component: str, path: str) -> bool:
        return path in self.shapes.get(component, ())

    def find(self, stem: Stem) -> list[tuple[str, str]]:
        """Every (component, canonical path) that a stem may mean."""
        for components in self._where(stem):
            found = [(c, path) for c in components for path in sorted(self._names(c, stem.flat).get(stem.path, ()))]
            if found:
                return found
        return []

    def _where(self, stem: Stem) -> Iterable[list[str]]:
        """The components to look in, the likelier ones first."""
        encoders = [component for component in self.shapes if component.startswith("text_encoder")]
        if stem.place in self.shapes:
            return ([stem.place],)
        if stem.place == DENOISER:
            return ([component for component in self.shapes if component not in encoders], encoders)
        return (encoders,)

    def _names(self, component: str, flat: bool) -> dict[str, set[str]]:
        """Canonical paths by spelling; two paths of one flattened spelling are both there."""
        names = self._spelled.get((component, flat))
        if names is None:
            names = self._spelled[component, flat] = {}
            for path in self.shapes[component]:
                for spelling in (path, path.removeprefix(_SHORTENED)):
                    names.setdefault(spelling.replace(".", "_") if flat else spelling, set()).add(path)
        return names
