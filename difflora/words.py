"""Words that adapters bring along (textual inversion): tokens in the tokenizers and rows in the embedding tables.

While words are in force, pipelines have copies of their tokenizers and text encoders have longer tables; afterwards
every one has its own object again.  The caller's tokenizers and tables are never written to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difflora import weights
from difflora.formats.errors import DiffLoRAError, some
from difflora.targets import unwrapped

if TYPE_CHECKING:
    from difflora.types import Vectors


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    """An embedding with a longer table in it, and the parameter that is its own."""

    module: nn.Module
    own: nn.Parameter


@dataclass(eq=False, slots=True)
class Words:
    """The words in force in a set of components, and what they replaced."""

    models: Mapping[str, nn.Module]
    current: tuple[Vectors, ...] = ()
    _tables: list[_Table] = field(default_factory=list)
    _tokenizers: list[tuple[Any, str, Any]] = field(default_factory=list)

    def show(self, wanted: tuple[Vectors, ...], pipelines: Iterable[Any]) -> None:
        """Bring exactly these words into force; after an error, those before are."""
        if wanted == self.current:
            return
        pipes, before = list(pipelines), self.current
        self._hide()
        try:
            self._add(wanted, pipes)
        except BaseException:
            self._hide()
            self._add(before, pipes)
            raise

    def _hide(self) -> None:
        for table in self._tables:
            now = table.module._parameters["weight"]
            # The model may have been moved or cast meanwhile.
            if now is not None:
                table.own.data = table.own.data.to(now.device, now.dtype)
            table.module._parameters["weight"] = table.own
        for pipe, name, own in self._tokenizers:
            setattr(pipe, name, own)
        self._tables.clear()
        self._tokenizers.clear()
        self.current = ()

    def _add(self, wanted: tuple[Vectors, ...], pipes: list[Any]) -> None:
        for component in dict.fromkeys(vectors.component for vectors in wanted):
            words = [vectors for vectors in wanted if vectors.component == component]
            self._add_to(component, words, pipes)
        self.current = wanted

    def _add_to(self, component: str, words: list[Vectors], pipes: list[Any]) -> None:
        name = component.replace("text_encoder", "tokenizer")
        tokens = [token for vectors in words for token in _tokens(vectors)]
        longer: dict[int, Any] = {}
        for pipe in pipes:
            own = getattr(pipe, name, None)
            if own is not None:
                longer.setdefault(id(own), _longer(own, tokens, component))
                self._tokenizers.append((pipe, name, own))
                setattr(pipe, name, longer[id(own)])
        if not longer:
            raise DiffLoRAError(f"the words {some(tokens)} need a {name}, and no pipeline has one.")
        rows = {tuple(tokenizer.convert_tokens_to_ids(tokens)) for tokenizer in longer.values()}
        if len(rows) > 1:
            raise DiffLoRAError(
                f"the pipelines have different {name}s, so {some(tokens)} cannot be added to all of them."
            )
        module = embedding(self.models[component], component)
        own = module._parameters["weight"]
        assert own is not None
        longer_table = _table(own, rows.pop(), words)
        # T5 has its table in two modules.
        for tied in [m for m in unwrapped(self.models[component]).modules() if m._parameters.get("weight") is own]:
            self._tables.append(_Table(tied, own))
            tied._parameters["weight"] = longer_table


def embedding(model: nn.Module, component: str) -> nn.Embedding:
    """The table of a text encoder's input embeddings; DiffLoRAError if it has none that can be replaced."""
    found = getattr(unwrapped(model), "get_input_embeddings", lambda: None)()
    if not isinstance(found, nn.Embedding):
        raise DiffLoRAError(f"{component} ({type(model).__name__}) has no table of input embeddings.")
    if "_hf_hook" in found.__dict__ or found.weight.is_meta or found.weight in weights.host_copies(model):
        raise DiffLoRAError(f"the embeddings of {component} are offloaded. Load adapters with words before offloading.")
    return found


def check(vectors: Vectors, models: Mapping[str, nn.Module], source: str) -> None:
    """DiffLoRAError for vectors that no text encoder here takes."""
    if vectors.component not in models:
        raise DiffLoRAError(f"{source}: the word {vectors.token!r} is for {vectors.component}, which is not here.")
    width, have = embedding(models[vectors.component], vectors.component).embedding_dim, vectors.tensor.shape[-1]
    if have != width or vectors.tensor.ndim not in (1, 2):
        shape = list(vectors.tensor.shape)
        raise DiffLoRAError(f"{source}: the vectors of {vectors.token!r} are {shape}; {vectors.component} has {width}.")


def _tokens(vectors: Vectors) -> list[str]:
    """One token a vector, named as diffusers names them: `word`, `word_1`, `word_2`, ..."""
    count = 1 if vectors.tensor.ndim == 1 else vectors.tensor.shape[0]
    return [vectors.token, *(f"{vectors.token}_{n}" for n in range(1, count))]


def _longer(tokenizer: Any, tokens: list[str], component: str) -> Any:
    """A copy of the tokenizer that knows these tokens; DiffLoRAError if it knows one already."""
    known = [token for token in tokens if token in tokenizer.get_vocab()]
    if known or len(set(tokens)) < len(tokens):
        raise DiffLoRAError(
            f"the tokenizer of {component} has {some(known or tokens)} already; unload what brought it, or rename it."
        )
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(tokens)
    return longer


@torch.no_grad()
def _table(own: nn.Parameter, rows: tuple[int, ...], words: list[Vectors]) -> nn.Parameter:
    """The table with the vectors in these rows, as many more as it needs."""
    table = own.new_zeros(max(own.shape[0], max(rows) + 1), own.shape[1])
    table[: own.shape[0]] = own
    new = torch.cat([vectors.tensor.reshape(-1, own.shape[1]).to(own.device, own.dtype) for vectors in words])
    table[list(rows)] = new
    return nn.Parameter(table, requires_grad=own.requires_grad)
