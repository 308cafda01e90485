"""What a file's metadata says of its own tensors: hashes, scales, how its alphas were stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from difflora.containers import digest, entry, legacy_digest, ordered

if TYPE_CHECKING:
    from torch import Tensor

# Where diffusers keeps the fields of PEFT's configs, by component.
CONFIG = "lora_adapter_metadata"
# How header fields end that say at which scale the tensors act: what is written says it anew.
SCALES = frozenset(
    (
        *(CONFIG, "r", "lora_rank", "lora_alpha", "alpha", "network_alpha", "rank_pattern", "alpha_pattern"),
        *("use_rslora", "use_dora", "lora_bias", "peft_type", "target_modules", "bias"),
    )
)
# The type and shape that the alphas of a file had, for layouts that keep them as text.
_ALPHAS = "difflora.alphas"
_USUAL = (torch.float32, ())


def kept(metadata: Mapping[str, str], added: Mapping[str, str] | None) -> dict[str, str]:
    """The metadata that stay true in another layout, and what is added to them."""
    own = {key: text for key, text in metadata.items() if key.rpartition(".")[2] not in SCALES}
    return {"format": "pt", **own, **(added or {})}


def alphas_noted(metadata: Mapping[str, str], deltas: Iterable[Any]) -> dict[str, str]:
    """The metadata, with the type and shape of the alphas where these are not what we would write."""
    alphas = (delta.alpha for delta in deltas)
    found = {(alpha.dtype, tuple(alpha.shape)) for alpha in alphas if isinstance(alpha, torch.Tensor)}
    form = found.pop() if len(found) == 1 else None
    if form is None or form == _USUAL:
        return dict(metadata)
    return {**metadata, _ALPHAS: json.dumps([str(form[0]).removeprefix("torch."), list(form[1])])}


def alphas_restored(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors whose alphas have the type and shape that `alphas_noted` wrote down, and the metadata without it."""
    left = {key: text for key, text in metadata.items() if key != _ALPHAS}
    try:
        name, shape = json.loads(metadata.get(_ALPHAS, "null"))
        dtype = getattr(torch, name)
        found = {
            key: tensor.to(dtype).reshape(shape)
            for key, tensor in tensors.items()
            if key.endswith(".alpha") and float(tensor.to(dtype)) == float(tensor)
        }
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return dict(tensors), left  # nothing, or nothing of ours, was written down
    return {**tensors, **found}, left


def rehashed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata, the hashes in it being those of these tensors.

    `sshs_*` are sd-scripts' (networks/lora.py, precalculate_safetensors_hashes): of the tensors as the safetensors
    library writes them, and of bytes 0x100000 to 0x110000 of the file that has the ss_* fields alone.
    """
    claims = metadata.keys() & {"sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256"}
    if not claims:
        return dict(metadata)
    entries = ordered({key: entry(tensor) for key, tensor in tensors.items()})
    whole = digest(entries)
    trained = {key: text for key, text in metadata.items() if key.startswith("ss_")}
    found = {
        "sshs_model_hash": whole,
        "sshs_legacy_hash": legacy_digest(entries, trained),
        "modelspec.hash_sha256": f"0x{whole}",
    }
    return {**metadata, **{claim: found[claim] for claim in claims}}
