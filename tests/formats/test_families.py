"""Every family's table against its models: names, fused rows, and what whole and partial files are taken for."""

import re
from collections.abc import Mapping

import pytest
from published import NAMES, SPELLINGS, Case, Model, case, file_of, instances, layers, plain

from difflora.formats.errors import DiffLoRAError
from difflora.formats.kinds import Shape
from difflora.formats.match import explain
from difflora.formats.rules import Rule, outline, sections


@pytest.mark.parametrize("name", NAMES)
def test_every_module_of_the_models_has_a_name(name: str) -> None:
    known = case(name)
    for model in known.models:
        network = known.networks[model.component]
        assert [path for path in model.shapes if not network.find(*outline(path), flat=False)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_module_of_a_model(name: str) -> None:
    known = case(name)
    for component, network in known.networks.items():
        shapes = {path: shape for m in known.models if m.component == component for path, shape in m.shapes.items()}
        patterns = dict.fromkeys((*network.names, *sections(network.rules)))
        missing = [text for text in patterns if not any(instances(Rule("", (text,)), shapes))]
        assert missing == [text for text in patterns if component == known.family.denoiser and text in known.spare]


@pytest.mark.parametrize("name", NAMES)
def test_fused_rows_are_those_of_the_parts(name: str) -> None:
    known = case(name)
    for component, network in known.networks.items():
        rules = (*network.rules, *(known.family.slotted if component == known.family.denoiser else ()))
        for rule in (rule for rule in rules if rule.rows):
            fitting = [rows_fit(rule, model.shapes, parts) for model in known.models for parts in layers(rule, model)]
            assert any(fitting), rule
            assert rule.whole or all(fitting), rule


def rows_fit(rule: Rule, shapes: Mapping[str, Shape], parts: tuple[str, ...]) -> bool:
    rows = [shapes[part][0] for part in parts]
    (cols,) = {shapes[part][1] for part in parts}
    spans = rule.spans(sum(rows), cols)
    return spans is not None and [sum(stop - start for start, stop in part) for part in spans] == rows


def check(known: Case, keys: Mapping[str, Shape], model: Model, families: frozenset[str], bound: bool) -> None:
    """Each module of the model is changed once, by as many rows as it has, and every key counts."""
    found = explain(keys, model={model.component: model.shapes} if bound else None)
    assert found.family is not None
    assert set(found.family.split("|")) == families
    assert {key for entry in found.entries for key in entry.keys.values()} == keys.keys()
    assert not found.uneven
    assert {
        (entry.component, entry.path): sum(stop - start for start, stop in entry.rows)
        or keys[entry.keys.get("up") or entry.keys["diff"]][0]
        for entry in found.entries
    } == {(model.component, path): shape[0] for path, shape in plain(known, model).items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_in_canonical_names_is_of_its_family(name: str) -> None:
    known = case(name)
    for model in (model.thin for model in known.models):
        keys = file_of(known, model, "canonical")
        check(known, keys, model, model.families | model.alike, bound=False)
        check(known, keys, model, model.families | model.alike, bound=True)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_in_native_names_is_of_its_family(name: str, spelling: str) -> None:
    known = case(name)
    for model in known.denoisers:
        keys = file_of(known, model, spelling)
        check(known, keys, model, model.families, bound=False)
        check(known, keys, model, model.families, bound=True)


@pytest.mark.parametrize("spelling", ["canonical", *SPELLINGS])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_one_kind_of_module_is_never_taken_for_another_family(name: str, spelling: str) -> None:
    """It is explained as its own family, alone or among others; or it is refused, and asks which family it is."""
    known = case(name)
    for model in known.denoisers:
        for part in by_module(file_of(known, model, spelling)).values():
            families, refusal = families_of(part)
            assert known.family.name in families or "Pass family=" in refusal, part


def families_of(keys: Mapping[str, Shape]) -> tuple[list[str], str]:
    try:
        return (explain(keys).family or "").split("|"), ""
    except DiffLoRAError as error:
        return [], str(error)


def by_module(keys: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """The keys of a file, by the kind of their module."""
    files: dict[str, dict[str, Shape]] = {}
    for key, shape in keys.items():
        module = re.sub(r"\.(lora_\w+(\.default)?\.weight|diff)$", "", key)
        files.setdefault(outline(module)[0], {})[key] = shape
    return files


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).ambiguous])
def test_names_that_mean_two_modules_are_refused(name: str) -> None:
    known = case(name)
    for model in known.denoisers:
        for path in (parts[0] for rule in known.ambiguous for parts in layers(rule, model)):
            with pytest.raises(DiffLoRAError, match="may mean"):
                explain({f"{path}.diff": model.shapes[path]}, family=known.family.name)
