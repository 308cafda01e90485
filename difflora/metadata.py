"""What pictures say about how they were made, and what files say about how to ask for them.

A PNG carries two texts: `parameters`, as AUTOMATIC1111 writes it and sites read it, and `difflora`, the whole `Job` as
versioned JSON.  Both are data: nothing that is read here is ever run or fetched.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from difflora import prompt as tags
from difflora.formats.errors import DiffLoRAError, some

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "Applied",
    "Job",
    "Parameters",
    "Triggers",
    "parameters",
    "read_parameters",
    "read_png",
    "save_png",
    "trigger_words",
]

_VERSION = 1
_FIELD = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
_SIZE = re.compile(r"(\d+)x(\d+)")
_FOREIGN = re.compile(r"[^A-Za-z0-9_.\-]+")
_COMMON = 24

# Scheduler class -> the words that A1111 has for it (Sampler, Schedule type).
_SAMPLERS: dict[str, tuple[str, str | None]] = {
    "DDIMScheduler": ("DDIM", None),
    "DPMSolverMultistepScheduler": ("DPM++ 2M", None),
    "DPMSolverSDEScheduler": ("DPM++ SDE", None),
    "EulerAncestralDiscreteScheduler": ("Euler a", None),
    "EulerDiscreteScheduler": ("Euler", None),
    "FlowMatchEulerDiscreteScheduler": ("Euler", "Simple"),
    "HeunDiscreteScheduler": ("Heun", None),
    "KDPM2DiscreteScheduler": ("DPM2", None),
    "LCMScheduler": ("LCM", None),
    "LMSDiscreteScheduler": ("LMS", None),
    "PNDMScheduler": ("PLMS", None),
    "UniPCMultistepScheduler": ("UniPC", None),
}


@dataclass(frozen=True, slots=True)
class Applied:
    """One adapter of a picture: what was loaded, and the weight of each component (and block pattern) it acted with."""

    name: str
    source: str
    components: tuple[tuple[str, float], ...]
    blocks: tuple[tuple[str, float], ...] = ()
    sha256: str | None = None
    lora_hash: str | None = None

    @property
    def denoiser(self) -> float:
        """The weight that a prompt tag with one number shows: the denoiser's, the text encoder's for want of one."""
        weights = [weight for name, weight in self.components if not name.startswith("text_encoder")]
        return (weights + [weight for _, weight in self.components] + [0.0])[0]


@dataclass(frozen=True, slots=True)
class Job:
    """Everything needed to make one picture again.

    `prompt` has its tags left in; `loras` is the set that they, and whatever was active, came to.  `guidance` is the
    pipeline's `guidance_scale`, `true_cfg` its `true_cfg_scale`; `max_sequence_length`, to which some pad the prompt,
    changes pictures too.  The seed is that of a generator on the CPU.
    """

    prompt: str
    model: str
    pipeline: str
    seed: int
    steps: int
    width: int
    height: int
    scheduler: str
    dtype: str
    negative_prompt: str | None = None
    guidance: float | None = None
    true_cfg: float | None = None
    max_sequence_length: int | None = None
    model_hash: str | None = None
    loras: tuple[Applied, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        """The job as one line of ASCII JSON, from which `from_json` makes an equal job."""
        data = asdict(self) | {"versions": dict(self.versions), "loras": [_lora_data(lora) for lora in self.loras]}
        return json.dumps({"version": _VERSION} | data, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote; DiffLoRAError for anything else."""
        try:
            data = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise DiffLoRAError(f"the difflora text of this picture is not JSON: {error}.") from error
        version = data.pop("version", None) if isinstance(data, dict) else None
        if version != _VERSION:
            raise DiffLoRAError(f"the job has version {version!r}; this difflora reads version {_VERSION}. Update it.")
        _check(data, _JOB, "job")
        for lora in data["loras"]:
            _check(lora, _APPLIED, "job.loras")
        loras = tuple(Applied(**{k: _pairs(v, float) for k, v in lora.items()}) for lora in data["loras"])
        return cls(**data | {"loras": loras, "versions": _pairs(data["versions"], str)})


@dataclass(frozen=True, slots=True)
class Parameters:
    """The `parameters` text of a picture, read as A1111 reads it."""

    prompt: str
    negative_prompt: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Triggers:
    """The words that call an adapter up, and who says so; `common` are the tags it was trained on, by how often."""

    words: tuple[str, ...] = ()
    source: str | None = None
    common: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


_TEXT, _MAYBE_TEXT, _MAYBE_NUMBER = (str,), (str, NoneType), (int, float, NoneType)
_JOB: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompt", "model", "pipeline", "scheduler", "dtype"), _TEXT),
    **dict.fromkeys(("seed", "steps", "width", "height"), (int,)),
    **dict.fromkeys(("negative_prompt", "model_hash"), _MAYBE_TEXT),
    **dict.fromkeys(("guidance", "true_cfg"), _MAYBE_NUMBER),
    "max_sequence_length": (int, NoneType),
    "loras": (list,),
    "versions": (dict,),
}
_APPLIED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "source"), _TEXT),
    **dict.fromkeys(("components", "blocks"), (dict,)),
    **dict.fromkeys(("sha256", "lora_hash"), _MAYBE_TEXT),
}


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _lora_data(lora: Applied) -> dict[str, Any]:
    return asdict(lora) | {"components": dict(lora.components), "blocks": dict(lora.blocks)}


def _check(data: object, table: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Refuse an object with other keys than the table's, or values of other types."""
    if not isinstance(data, dict) or data.keys() != table.keys():
        odd = sorted(data.keys() ^ table.keys()) if isinstance(data, dict) else [type(data).__name__]
        raise DiffLoRAError(f"{where}: {some(odd)} is missing or unknown; expected {some(table, 20)}.")
    for key, types in table.items():
        value = data[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise DiffLoRAError(f"{where}.{key} is {value!r}; expected {' or '.join(t.__name__ for t in types)}.")


def _pairs(value: Any, kind: type) -> Any:
    """A map as pairs, its values checked; any other value as it is."""
    if not isinstance(value, dict):
        return value
    types = (int, float) if kind is float else (kind,)
    wrong = [key for key, item in value.items() if not isinstance(item, types) or isinstance(item, bool)]
    if wrong:
        raise DiffLoRAError(f"job: the value of {some(wrong)} is not a {kind.__name__}.")
    return tuple(value.items())


def parameters(job: Job) -> str:
    """The job as A1111's `parameters` text.

    Tags stand behind the prompt, one number each, under names that sites can read; the exact set is in `Job.to_json`.
    """
    text, names = tags.parse(job.prompt)[0], _public_names(job.loras)
    shown = [f"<lora:{name}:{_rounded(lora.denoiser)}>" for name, lora in zip(names, job.loras, strict=True)]
    known = [f"{name}: {lora.lora_hash[:12]}" for name, lora in zip(names, job.loras, strict=True) if lora.lora_hash]
    fields = ", ".join(f"{key}: {_quoted(value)}" for key, value in _fields(job, known) if value is not None)
    negative = [f"Negative prompt: {job.negative_prompt}"] if job.negative_prompt else []
    return "\n".join([" ".join([text, *shown] if text else shown), *negative, fields])


def _fields(job: Job, hashes: list[str]) -> list[tuple[str, str | None]]:
    sampler, schedule = _SAMPLERS.get(job.scheduler, (job.scheduler.removesuffix("Scheduler"), None))
    guidance = None if job.guidance is None else tags.number(job.guidance)
    # Flux takes the guidance as an input of the model; A1111's "CFG scale" is the one that runs the model twice.
    distilled = job.pipeline.startswith("Flux")
    return [
        ("Steps", str(job.steps)),
        ("Sampler", sampler),
        ("Schedule type", schedule),
        ("CFG scale", tags.number(job.true_cfg or 1.0) if distilled else guidance),
        ("Distilled CFG Scale", guidance if distilled else None),
        ("Seed", str(job.seed)),
        ("Size", f"{job.width}x{job.height}"),
        ("Model hash", job.model_hash),
        ("Model", re.split(r"[/\\]", job.model.rstrip("/\\"))[-1].removesuffix(".safetensors")),
        ("RNG", "CPU"),
        ("Lora hashes", ", ".join(hashes) or None),
        ("Version", f"difflora {dict(job.versions).get('difflora', '')}".strip()),
    ]


def _public_names(loras: Iterable[Applied]) -> tuple[str, ...]:
    """Names of ASCII letters, digits and `_.-` only, each once."""
    names: list[str] = []
    for lora in loras:
        clean = _FOREIGN.sub("_", lora.name)
        clean = clean if clean.strip("_") else f"lora_{(lora.lora_hash or '')[:8]}".rstrip("_")
        free = (name for name in chain([clean], (f"{clean}_{n}" for n in count(2))) if name not in names)
        names.append(next(free))
    return tuple(names)


def _rounded(weight: float) -> str:
    return tags.number(round(weight, 4) + 0.0)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ",\n:") else value


def read_parameters(text: str) -> Parameters:
    """The parts of a `parameters` text.  The last line holds fields only if at least three are found in it."""
    *lines, last = text.strip().split("\n")
    found = _FIELD.findall(last)
    if len(found) < 3:
        lines, found = [*lines, last], []
    at = next((i for i, line in enumerate(lines) if line.startswith("Negative prompt:")), len(lines))
    negative = "\n".join(lines[at:]).removeprefix("Negative prompt:").strip()
    return Parameters("\n".join(lines[:at]).strip(), negative, dict(_sized((k, _unquoted(v)) for k, v in found)))


def _sized(fields: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    for key, value in fields:
        size = _SIZE.fullmatch(value)
        yield from ((f"{key}-1", size[1]), (f"{key}-2", size[2])) if size else ((key, value),)


def _unquoted(value: str) -> str:
    try:
        plain = json.loads(value) if value.startswith('"') else value
    except ValueError:
        return value
    return str(plain)


def save_png(image: Image, path: str | Path, job: Job | None = None) -> None:
    """Write the picture with both texts; the file appears whole or not at all, and replaces one of that name."""
    from PIL.PngImagePlugin import PngInfo

    file, info = Path(path), PngInfo()
    if job is not None:
        info.add_text("parameters", parameters(job).encode("utf-8", "replace").decode())
        info.add_text("difflora", job.to_json())
    part = file.with_name(file.name + ".tmp")
    try:
        image.save(part, format="PNG", pnginfo=info)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def read_png(path: str | Path) -> tuple[str | None, Job | None]:
    """(`parameters` text, job) of a PNG, each None where the picture has none."""
    from PIL import PngImagePlugin, UnidentifiedImageError

    try:
        with PngImagePlugin.PngImageFile(path) as image:
            texts = dict(image.text)
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
        raise DiffLoRAError(
            f"{path} cannot be read as PNG ({error}); expected a picture that difflora saved."
        ) from error
    job = texts.get("difflora")
    return texts.get("parameters"), None if job is None else Job.from_json(job)


def trigger_words(path: str | Path | None, metadata: Mapping[str, str]) -> Triggers:
    """What to write in a prompt to call the adapter up; `path` is its file, beside which sidecars are looked for.

    The first that says something wins: the user's `stem.json`, `modelspec.trigger_phrase`, Civitai's trained words
    (`stem.civitai.info`, `stem.metadata.json`), `modelspec.usage_hint`, and a training on one single tag.
    """
    notes: list[str] = []
    user, civitai, manager = (_sidecar(path, end, notes) for end in (".json", ".civitai.info", ".metadata.json"))
    counts = _tag_counts(metadata.get("ss_tag_frequency", ""))
    single = [tag for tags_of in counts for tag in tags_of] if len(counts) == 1 and len(counts[0]) == 1 else []
    says: tuple[tuple[str, object], ...] = (
        ("activation text", user.get("activation text")),
        ("modelspec.trigger_phrase", metadata.get("modelspec.trigger_phrase")),
        ("civitai.info", civitai.get("trainedWords")),
        ("metadata.json", manager.get("trainedWords")),
        ("metadata.json", _within(manager, "civitai").get("trainedWords")),
        ("modelspec.usage_hint", metadata.get("modelspec.usage_hint")),
        ("ss_tag_frequency", single),
    )
    words, source = next(((w, source) for source, said in says if (w := _words(said))), ((), None))
    return Triggers(words, source, _common(counts), tuple(notes))


def _words(said: object) -> tuple[str, ...]:
    listed = said if isinstance(said, list) else [said]
    return tuple(dict.fromkeys(word.strip(" ,") for word in listed if isinstance(word, str) and word.strip(" ,")))


def _within(data: Mapping[str, object], key: str) -> Mapping[str, object]:
    inner = data.get(key)
    return inner if isinstance(inner, dict) else {}


def _sidecar(path: str | Path | None, end: str, notes: list[str]) -> dict[str, object]:
    file = Path(path).with_suffix(end) if path is not None else None
    if file is None or not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        notes.append(f"{file.name} beside the file is not a JSON object; not used")
        return {}
    return data


def _tag_counts(text: str) -> list[dict[str, int]]:
    """ss_tag_frequency as one {tag: count} a folder; anything that is not one is left out."""
    try:
        folders = json.loads(text)
    except (ValueError, RecursionError):
        return []
    tables = [table for table in folders.values() if isinstance(table, dict)] if isinstance(folders, dict) else []
    return [{tag.strip(): n for tag, n in table.items() if type(n) is int and tag.strip()} for table in tables]


def _common(counts: Iterable[Mapping[str, int]]) -> tuple[tuple[str, int], ...]:
    """The tags trained on most; where they are whole sentences, the words of three letters and more."""
    total = Counter[str]()
    for table in counts:
        total.update(table)
    if total and sum(map(len, total)) / len(total) >= 16:
        words = Counter[str]()
        for tag, times in total.items():
            words.update({word: times * n for word, n in Counter(re.findall(r"\w{3,}", tag)).items()})
        total = words
    return tuple(total.most_common(_COMMON))
