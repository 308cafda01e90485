"""What a loader makes of a file: `right`, what is wrong with the weights afterwards, or the exception."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peers.files import File
from peers.models import pipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

import difflora

Weights = Mapping[str, Tensor]
# Rounding of float32 beside a change of which this is the share.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One file for one model.

    `row` is what is known of diffusers that it shows, `file` what is in it.  `published` is the same model in the
    size that diffusers' converter expects, for where this alone would make it fail.  `refused` is what difflora says
    where it refuses the file as well.
    """

    row: str
    model: str
    file: str
    write: Callable[[File], None]
    how: str = "load_lora_weights"
    published: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.row} | {self.model} | {self.file}"

    def made(self, model: str) -> File:
        file = File(pipeline(model))
        self.write(file)
        return file


def weights(pipe: Any) -> dict[str, Tensor]:
    """Every parameter that the pipeline computes with, by component and name, PEFT's adapters merged into them."""
    found: dict[str, Tensor] = {}
    for component, model in pipe.components.items():
        if not isinstance(model, nn.Module):
            continue
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.merge()
        for name, parameter in model.named_parameters():
            if not any(mark in name for mark in (".lora_", ".lokr_")):
                found[f"{component}.{name.replace('.base_layer', '')}"] = parameter.detach().clone()
    return found


def row(name: str, *files: tuple[str, str, Callable[[File], None]], **options: Any) -> tuple[Case, ...]:
    """The cases (model, what is in the file, what writes it) of one row."""
    return tuple(Case(name, *file, **options) for file in files)


def unchanged(before: Weights, after: Weights) -> bool:
    """Whether every parameter has the same bits."""
    return all(_same(before.get(name), after.get(name)) for name in before.keys() | after.keys())


def judged(before: Weights, after: Weights, file: File) -> str:
    """`right`, or what is wrong."""
    named = {**file.changes, **file.values}
    right = sum(_equal(name, before, after, file) for name in named)
    others = [n for n in before.keys() | after.keys() if n not in named and not _same(before.get(n), after.get(n))]
    if right == len(named) and not others:
        return "right"
    if unchanged(before, after):
        return "changes nothing"
    more = f", and {len(others)} that are not in the file" if others else ""
    return f"changes {right} of {len(named)} parameters right{more}"


def _equal(name: str, before: Weights, after: Weights, file: File) -> bool:
    value = after.get(name)
    if value is None:
        return False
    if name in file.values:
        return torch.equal(value, file.values[name])
    change, base = file.changes[name], before[name].double()
    if change.ndim > 1 and change.shape[1] > base.shape[1]:
        base = nn.functional.pad(base, (0, change.shape[1] - base.shape[1]))
    change = change.reshape(base.shape)
    gap = (value.double() - base - change).abs().max() if value.shape == base.shape else torch.inf
    return bool(gap <= TOLERANCE * change.abs().max())


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and one.shape == two.shape and torch.equal(one, two)


def of_diffusers(case: Case) -> str:
    """What diffusers does with the file of a case."""
    file = case.made(case.published or case.model)
    before = weights(file.pipe)
    with _quiet():
        try:
            _LOADERS[case.how](file.pipe, dict(file.tensors), case)
        except Exception as error:  # whatever it raises is the outcome
            return f"raises {type(error).__name__}"
        return judged(before, weights(file.pipe), file)


def of_difflora(case: Case) -> str:
    """What difflora does with it, its report and its way back included; a refusal is `refuses: ` and the reason."""
    file = case.made(case.model)
    before = weights(file.pipe)
    pipe = difflora.attach(file.pipe)
    try:
        if case.how == "hotswap":
            pipe.load_lora(_first(case), name="it", mode="merged")
            pipe.load_lora_weights(file.tensors, adapter_name="it", hotswap=True)
        else:
            report = pipe.load_lora(file.tensors, mode="merged")
            assert not report.unmatched and {_short(name) for name in report.matched} == _named(file), report
    except difflora.DiffLoRAError as error:
        assert unchanged(before, weights(pipe)), "a refused file leaves something behind"
        return f"refuses: {error}"
    outcome = judged(before, weights(pipe), file)
    pipe.unload_loras()
    assert unchanged(before, weights(pipe)), "unloading leaves something behind"
    return outcome


def _named(file: File) -> set[str]:
    """The modules and parameters that a file changes, as reports call them; words are no part of a report."""
    return {
        _short(name.removesuffix(".weight")) for name in (*file.changes, *file.values) if "token_embedding" not in name
    }


def _short(name: str) -> str:
    """A name without the level that transformers 5 dropped from CLIPTextModel."""
    return name.replace("text_encoder.text_model.", "text_encoder.")


def _first(case: Case) -> dict[str, Tensor]:
    """The LoRA that a hot swap replaces."""
    file = File(pipeline(case.model))
    file.lora("transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q")
    return file.tensors


def _load(pipe: Any, tensors: dict[str, Tensor], case: Case) -> None:
    pipe.load_lora_weights(tensors)


def _load_into_model(pipe: Any, tensors: dict[str, Tensor], case: Case) -> None:
    pipe.transformer.load_lora_adapter(tensors, prefix=None)


def _convert_alone(pipe: Any, tensors: dict[str, Tensor], case: Case) -> None:
    """The converter without the model's configuration, then the model's loader."""
    state, alphas = pipe.lora_state_dict(tensors)
    pipe.load_lora_into_unet(state, alphas, unet=pipe.unet)


def _hotswap(pipe: Any, tensors: dict[str, Tensor], case: Case) -> None:
    pipe.load_lora_weights(_first(case), adapter_name="it")
    pipe.load_lora_weights(tensors, adapter_name="it", hotswap=True)


_LOADERS: dict[str, Callable[[Any, dict[str, Tensor], Case], None]] = {
    "load_lora_weights": _load, "load_lora_adapter": _load_into_model,
    "lora_state_dict without unet_config": _convert_alone, "hotswap": _hotswap,
}  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what diffusers and PEFT say about files that they do not understand."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
