"""Where an adapter's bytes are: a file, a folder, a Hub repository, the bundled adapters.

`locate` turns what a user typed into files on disk and reads nothing from them.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from difflora.formats.errors import DiffLoRAError, some
from difflora.formats.layouts import COMPONENTS

# Names that trainers and savers give to every file; such a file is called after its folder.
GENERIC_STEMS = frozenset({"adapter_model", "pytorch_lora_weights", "lora", "model", "diffusion_pytorch_model"})
_FIRST = ("pytorch_lora_weights", "adapter_model", "lora")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STATE = ("scheduler", "optimizer", "checkpoint")
_PEFT = ("adapter_model.safetensors", "adapter_config.json")
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?P<sub>(?:/[\w.-]+)*)(?::(?P<file>[^@]+))?(?:@(?P<rev>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class Place:
    """The weight file, the PEFT config beside it if there is one, and what the adapter is called."""

    file: Path
    config: Path | None
    name: str


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hub; the fields are huggingface_hub's."""

    weight_name: str | None = None
    subfolder: str | None = None
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    force_download: bool = False


def locate(
    source: str | Path, folders: Sequence[str | Path] = (), hub: Hub | None = None, pickle: bool = False
) -> Place:
    """The file that `source` means.

    Tried in this order: a path, the path + `.safetensors`, a name in `folders`, a bundled adapter, `user/repo` (also
    `user/repo/subfolder:file@revision`).  DiffLoRAError lists what was tried, or the files to choose from.
    """
    if not isinstance(source, str | Path) or not str(source):
        raise DiffLoRAError(f"{source!r} is no adapter; expected a path, a name, user/repo or a state dict.")
    hub = hub or Hub()
    text = str(source)
    try:
        tried = _paths(text, folders)
        for path in tried:
            if path.is_file():
                return _place(path, path.parent / "adapter_config.json", pickle)
            if path.is_dir():
                return _in_folder(path / (hub.subfolder or ""), hub.weight_name, pickle)
    except (OSError, UnicodeError) as error:
        raise DiffLoRAError(f"{text[:200]!r} cannot be looked up ({type(error).__name__}: {error}).") from error
    bundled = _bundled(text)
    if bundled is not None:
        return bundled
    address = _HUB.fullmatch(text) if isinstance(source, str) else None
    # "loras/nope" beside a folder ./loras is a file that is not there: no reason to wait for the Hub.
    local = address is not None and not address["file"] and not address["rev"] and Path(text.split("/")[0]).is_dir()
    # Repositories are not called after weight files.
    file = not (address and address["file"]) and text.lower().endswith((".safetensors", ".sft", *_PICKLES))
    if address is None or local or file:
        from difflora.demo import ADAPTERS

        places = [*(str(p) for p in tried), f"the bundled adapters ({', '.join(ADAPTERS)})"]
        close = difflib.get_close_matches(text, ADAPTERS, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        hint = f" The folder {text.split('/')[0]} is here, so only {text}@main asks the Hub." if local else ""
        raise DiffLoRAError(
            f"{text!r} is no adapter: tried {some(places, 6)}. "
            f"Expected a .safetensors file, a folder that holds one, a bundled name, or user/repo.{hint}{meant}"
        )
    return _from_hub(address, hub, pickle)


def component_folders(source: object) -> dict[str, Place]:
    """The PEFT folders in a folder that has no weights of its own, by the components after which they are called."""
    if not isinstance(source, str | Path):
        return {}
    try:
        root = Path(os.path.expanduser(str(source)))
        if not root.is_dir() or any(root.glob("*.safetensors")):
            return {}
        inside = sorted(p for p in root.iterdir() if p.name in COMPONENTS and (p / _PEFT[0]).is_file())
        return {p.name: Place(p / _PEFT[0], p / _PEFT[1], root.name) for p in inside if (p / _PEFT[1]).is_file()}
    except (OSError, UnicodeError, ValueError):
        return {}


def _paths(text: str, folders: Sequence[str | Path]) -> list[Path]:
    """The local paths that a source may mean, in order."""
    if isinstance(folders, str | Path):
        folders = (folders,)
    names = (text,) if text.endswith(".safetensors") else (text, text + ".safetensors")
    # Unlike Path.expanduser, this leaves a home that is not known as it is.
    return [Path(os.path.expanduser(n)) for n in names] + [Path(folder) / n for folder in folders for n in names]


def _bundled(name: str) -> Place | None:
    if not re.fullmatch(r"[\w-]+", name):
        return None
    from difflora.demo import ADAPTERS

    path = ADAPTERS.get(name)
    if path is None:
        return None
    place = _in_folder(path, None, False) if path.is_dir() else _place(path, path.parent / "adapter_config.json", False)
    return Place(place.file, place.config, name)


def _check_suffix(file: Path, pickle: bool) -> None:
    if file.suffix.lower() in _PICKLES and not pickle:
        raise DiffLoRAError(
            f"{file} is a pickle, which can run code when it is read. Expected .safetensors; "
            "pass allow_pickle=True to read its tensors alone (torch.load with weights_only=True)."
        )
    if file.suffix.lower() not in (".safetensors", ".sft", *_PICKLES):
        raise DiffLoRAError(f"{file} has the suffix {file.suffix!r}; expected a .safetensors file.")


def _place(file: Path, config: Path, pickle: bool) -> Place:
    _check_suffix(file, pickle)
    stem = file.stem if file.stem not in GENERIC_STEMS else file.resolve().parent.name
    # A PEFT config describes the file that PEFT writes, not whatever else lies in the folder.
    belongs = config.is_file() and file.stem == "adapter_model"
    return Place(file, config if belongs else None, stem)


def _in_folder(folder: Path, weight_name: str | None, pickle: bool) -> Place:
    if not folder.is_dir():
        raise DiffLoRAError(f"{folder} is no folder; expected one with a .safetensors file.")
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    name = choose(names, weight_name, str(folder), pickle)
    place = _place(folder / name, folder / "adapter_config.json", pickle)
    config = folder / "adapter_config.json"
    # The sole weight file of a folder with a PEFT config is what that config describes, whatever its name.
    return Place(place.file, config if config.is_file() else None, place.name)


def choose(names: Sequence[str], weight_name: str | None, where: str, pickle: bool) -> str:
    """The weight file among `names`; DiffLoRAError if there is none, or several and no `weight_name`."""
    if weight_name is not None:
        if weight_name not in names:
            raise DiffLoRAError(f"{where} holds no {weight_name!r}; it holds {some(names) or 'nothing'}.")
        return weight_name
    weights = [n for n in names if n.endswith(".safetensors") and not any(word in n for word in _STATE)]
    if not weights and pickle:
        weights = [n for n in names if n.endswith(_PICKLES) and not any(word in n for word in _STATE)]
    weights = [n for n in weights if "/" not in n] or weights
    if not weights:
        pickles = [n for n in names if n.endswith(_PICKLES)]
        hint = f" {some(pickles)} are pickles: allow_pickle=True reads them." if pickles else ""
        raise DiffLoRAError(f"{where} holds no .safetensors file; it holds {some(names) or 'nothing'}.{hint}")
    for stem in _FIRST:
        preferred = [n for n in weights if Path(n).stem == stem]
        if len(preferred) == 1:
            return preferred[0]
    if len(weights) > 1:
        listed = "; ".join(f"{i}. weight_name={name!r}" for i, name in enumerate(weights, 1))
        raise DiffLoRAError(f"{where} holds {len(weights)} weight files; pass one of: {listed}")
    return weights[0]


def _from_hub(address: re.Match[str], hub: Hub, pickle: bool) -> Place:
    from huggingface_hub import hf_hub_download

    repo = address["repo"]
    subfolder = hub.subfolder or address["sub"].strip("/") or None
    revision = hub.revision or address["rev"]
    try:
        offline, names = _listing(repo, subfolder, hub, revision)
        name = choose(names, hub.weight_name or address["file"], f"{repo} on the Hub", pickle)
        _check_suffix(Path(name), pickle)
        fetch = functools.partial(
            hf_hub_download,
            repo,
            subfolder=subfolder,
            revision=revision,
            token=hub.token,
            cache_dir=hub.cache_dir,
            local_files_only=offline,
            force_download=hub.force_download and not offline,
        )
        file = Path(fetch(name))
        described = "adapter_config.json" in names and Path(name).stem in GENERIC_STEMS
        config = Path(fetch("adapter_config.json")) if described else None
    except DiffLoRAError:
        raise
    except Exception as error:  # the client raises its own, the HTTP library's and the system's errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DiffLoRAError(
            f"{repo!r} could not be read from the Hub ({type(error).__name__}: {reason}). No local file or bundled "
            "adapter has that name either; expected a path or a repository that can be reached."
        ) from error
    stem = Path(name).stem
    return Place(file, config, stem if stem not in GENERIC_STEMS else repo.split("/")[1])


def _listing(repo: str, subfolder: str | None, hub: Hub, revision: str | None) -> tuple[bool, list[str]]:
    """(whether only the cache may be used, the file names in the subfolder)."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if hub.local_files_only or constants.HF_HUB_OFFLINE:
        root = Path(snapshot_download(repo, revision=revision, cache_dir=hub.cache_dir, local_files_only=True))
        names = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if p.is_file()]
    else:
        names = sorted(HfApi(token=hub.token).list_repo_files(repo, revision=revision))
    prefix = f"{subfolder}/" if subfolder else ""
    inside = [n[len(prefix) :] for n in names if n.startswith(prefix)]
    return hub.local_files_only or constants.HF_HUB_OFFLINE, inside
