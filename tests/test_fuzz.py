"""Damaged and odd files: each loads or is refused with a DiffLoRAError, in time and memory, and changes nothing.

A case is a small valid file (every kind, several layouts) with one to three seeded mutations.  Every fourth goes
through bytes on disk, where headers are damaged too; the others are read from memory.  Every fifth is inspected, bound
and loaded into a pipeline and taken out again.  `case(number)` makes the same case each time.
"""

from __future__ import annotations

import faulthandler
import json
import math
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig
from support import KINDS as LINEAR
from torch import Tensor, nn

import difflora
from difflora import DiffLoRAError
from difflora.formats.families import FAMILIES
from difflora.formats.layouts import LEAVES
from difflora.loading import Raw, load, normalise
from difflora.tools import inspect_adapter

SHORT, LONG, SHARDS = 2_000, 100_000, 10
SECONDS = 20
SPARE = 64 << 20
LONGEST_MESSAGE = 4_000
Tensors = dict[str, Tensor]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 9


def pair(stem: str, down: str, up: str, rows: int, cols: int, *kernel: int) -> Tensors:
    return {f"{stem}.{down}": rand(2, cols, *kernel), f"{stem}.{up}": rand(rows, 2, *(1 for _ in kernel))}


# ---- valid files ----------------------------------------------------------------------------------------------------

# Further spellings and kinds of a matrix; those of tests/support.py are in `LINEAR`.
MATRIX: dict[str, Callable[[str, int, int], Tensors]] = {
    **LINEAR,
    "first LoRA of diffusers": lambda s, o, i: pair(s, "lora.down.weight", "lora.up.weight", o, i),
    "LoRA with a slot": lambda s, o, i: pair(s, "lora_A.default.weight", "lora_B.default.weight", o, i),
    "LoKr of factors": lambda s, o, i: (
        {f"{s}.lokr_w1_a": rand(4, 2), f"{s}.lokr_w1_b": rand(2, 2), f"{s}.alpha": torch.tensor(2)}
        | {f"{s}.lokr_w2_a": rand(o // 4, 2), f"{s}.lokr_w2_b": rand(2, i // 2)}
    ),
    "DoRA of PEFT": lambda s, o, i: (
        pair(s, "lora_A.weight", "lora_B.weight", o, i) | {f"{s}.lora_magnitude_vector": rand(o).abs()}
    ),
    "DoRA of LoHa": lambda s, o, i: LINEAR["LoHa"](s, o, i) | {f"{s}.dora_scale": rand(o, 1).abs()},
    "DoRA of LoKr": lambda s, o, i: LINEAR["LoKr"](s, o, i) | {f"{s}.dora_scale": rand(1, i).abs()},
    "IA3 of inputs": lambda s, o, i: {f"{s}.weight": rand(i), f"{s}.on_input": torch.tensor(1)},
    "OFT, bounded, rescaled": lambda s, o, i: (
        {f"{s}.oft_blocks": rand(o // 8, 8, 8), f"{s}.alpha": torch.tensor(0.01), f"{s}.rescale": rand(o, 1)}
    ),
    "OFT v2, shared": lambda s, o, i: (
        {f"{s}.oft_R.weight": rand(1, 6), f"{s}.oft_R.scaled_oft": torch.tensor(True), f"{s}.dora_scale": rand(o, 1)}
    ),
}
CONVOLUTION: dict[str, Callable[[str, int, int], Tensors]] = {
    "LoCon": lambda s, o, i: pair(s, "lora_down.weight", "lora_up.weight", o, i, 3, 3),
    "Tucker": lambda s, o, i: (
        pair(s, "lora_down.weight", "lora_up.weight", o, i, 1, 1) | {f"{s}.lora_mid.weight": rand(2, 2, 3, 3)}
    ),
    "LoHa": lambda s, o, i: LINEAR["LoHa"](s, o, i * 9),
    "Tucker LoHa": lambda s, o, i: (
        {f"{s}.hada_t{n}": rand(2, 2, 3, 3) for n in "12"}
        | {f"{s}.hada_w{n}_a": rand(2, o) for n in "12"}
        | {f"{s}.hada_w{n}_b": rand(2, i) for n in "12"}
    ),
    "LoKr": lambda s, o, i: {f"{s}.lokr_w1": rand(2, 2), f"{s}.lokr_w2": rand(o // 2, i // 2, 3, 3)},
    "DoRA": lambda s, o, i: CONVOLUTION["LoCon"](s, o, i) | {f"{s}.dora_scale": rand(1, i, 1, 1).abs()},
    "difference": lambda s, o, i: {f"{s}.diff": rand(o, i, 3, 3), f"{s}.diff_b": rand(o)},
    "OFT": lambda s, o, i: {f"{s}.oft_blocks": rand(o // 4, 4, 4), f"{s}.alpha": torch.tensor(0.0)},
}
# pipeline -> stems of matrices and of 3x3 kernels, with their rows and columns
STEMS: dict[str, tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]] = {
    "flux": (
        {
            "lora_unet_double_blocks_0_img_attn_proj": (32, 32),
            "lora_unet_double_blocks_1_txt_attn_qkv": (96, 32),
            "lora_transformer_transformer_blocks_0_attn_to_q": (32, 32),
            "diffusion_model.double_blocks.0.img_mlp.0": (128, 32),
            "double_blocks.1.img_attn.qkv": (96, 32),
            "transformer.single_transformer_blocks.1.attn.to_v": (32, 32),
            "base_model.model.single_transformer_blocks.0.proj_mlp": (128, 32),
            "lycoris_transformer_blocks_1_attn_to_add_out": (32, 32),
            "text_encoder.text_model.encoder.layers.0.self_attn.q_proj": (16, 16),
            "lora_te1_text_model_encoder_layers_1_mlp_fc1": (24, 16),
            "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q": (16, 24),
        },
        {},
    ),
    "sd": (
        {
            "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q": (16, 16),
            "unet.down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2": (8, 32),
            "lora_te_text_model_encoder_layers_0_mlp_fc2": (16, 24),
        },
        {"lora_unet_down_blocks_0_resnets_0_conv1": (8, 8), "unet.mid_block.resnets.1.conv2": (16, 16)},
    ),
}
# What other entries of the format hold: a table's factors, norms, and a control LoRA's scales.
OTHERS: dict[str, Callable[[], Tensors]] = {
    "embedding": lambda: pair(
        "text_encoder.text_model.embeddings.token_embedding", "lora_embedding_A", "lora_embedding_B", 16, 86
    ),
    "norm": lambda: {
        f"lora_te_text_model_encoder_layers_0_layer_norm1.{n}": rand(16) for n in ("w_norm", "b_norm")
    },
}  # fmt: skip


@dataclass(frozen=True)
class Seed:
    """A valid file for a pipeline."""

    name: str
    pipeline: str
    tensors: Tensors


@cache
def seeds() -> list[Seed]:
    found = [Seed(name, "sd" if name == "norm" else "flux", make()) for name, make in OTHERS.items()]
    for pipeline, spelled in STEMS.items():
        for kinds, stems in zip((MATRIX, CONVOLUTION), spelled, strict=True):
            found += [
                Seed(f"{kind}, {stem}", pipeline, make(stem, *size))
                for stem, size in stems.items()
                for kind, make in kinds.items()
                if not (kind == "full, bias" and "text_encoder_2" in stem)
            ]
    return found


# ---- what is done to them -------------------------------------------------------------------------------------------


@dataclass
class File:
    """A file to be: tensors, metadata, config; another header and what becomes of all the bytes, where given."""

    tensors: Tensors
    metadata: dict[str, str] = field(default_factory=dict)
    config: str | None = None
    header: dict[str, Any] | str | bytes | None = None
    cut: Callable[[bytes], bytes] | None = None

    def written(self) -> tuple[dict[str, Any], bytes]:
        """(header, the rest), undamaged."""
        head: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        body = b""
        for key, tensor in sorted(self.tensors.items()):
            own = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            span = [len(body), len(body) + len(own)]
            head[key] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            body += own
        return head, body

    @property
    def data(self) -> bytes:
        """The file's bytes."""
        head, body = self.written()
        head = head if self.header is None else self.header
        text = head if isinstance(head, str | bytes) else json.dumps(head)
        head = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        whole = len(head).to_bytes(8, "little") + head + body
        return self.cut(whole) if self.cut else whole

    def parsed(self) -> dict[str, Any]:
        """The header to be changed further."""
        if not isinstance(self.header, dict):
            self.header = self.written()[0]
        return self.header


Change = Callable[[random.Random, File], None]
NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    0.5,
    2**31,
    2**40,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    1e308,
    "4",
    None,
    True,
    [],
)
SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (1,), (2,), (7,), (0, 4), (4, 0), (1, 1), (2, 32), (32, 2), (3, 5), (2, 2, 2), (1, 1, 1, 1)),
    *((2, 2, 3, 3), (1, 2, 1, 2, 1), (300, 2), (2, 300)),
)
STORED = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.int64: "I64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = list(STORED)
NAMES = (
    *("F4", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F64", "I8", "U8", "BOOL", "I64", "U64", "C64", "f32", ""),
    *(None, 5, "F" * 10_000),
)
ALPHAS: tuple[Callable[[], Tensor], ...] = (
    *(lambda v=v: torch.tensor(v) for v in (math.nan, math.inf, -math.inf, -4.0, 0.0, 1e38, 1e-38, True, 2 + 1j)),
    *(lambda v=v: torch.tensor(v) for v in (2**63 - 1, -(2**63), 0, [4.0], [4.0, 4.0], [[4.0]], [])),
    *(lambda t=t: torch.tensor(4.0).to(t) for t in DTYPES),
    lambda: torch.tensor(1e300, dtype=torch.float64),
)
WORDS = (
    "",
    ".",
    "..",
    "ä",
    "\U0001f600",
    "\ud83d",
    "\x00",
    " ",
    "\n",
    "a" * 100_000,
    "0" * 6_000,
    "9" * 6_000,
    "²",
    "٣",
    "{i}",
    "#",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "∞", "none", -1, 0, 1, 2, 0.5, 1e308, -1e308, math.nan, math.inf, 10**400, [], [1]),
    *({}, {"a": 1}, {"": 4}, {".*": 4}, {"to_q": "x"}, {"(": 1}, {"(a+)+$": 1}, {"a" * 600: 1}, {"[[a": 2}, {"[": 1}),
    *({"(?i)to_q": 3}, {"(?a)(?u)": 1}, {"(?L)": 1}, {"\\": 1}, {"a{99999999999}": 1}, {"(?<=a*)b": 1}, {"to_q": 2.5}),
    *("LORA", "LOHA", "LOKR", "OFT", "IA3", "all", "pissa", [[[]]], {"a": {"b": {}}}, "a" * 100_000, "null", "1", "{"),
)
PATTERNS = [value for value in VALUES if isinstance(value, dict)]
CONFIGS = (LoraConfig, LoHaConfig, LoKrConfig, OFTConfig)
FIELDS = sorted({f.name for config in CONFIGS for f in fields(config)} | {"lora_rank", "network_alpha", "rank"})
PREFIXES = ("", "", "transformer.", "unet.", "text_encoder.", ".", "a.b.")
HEADERS: dict[str, Any] = {
    "ss_network_args": '{"algo": "lora"}', "modelspec.architecture": "flux-1-dev/lora", "ss_output_name": "x",
    "ss_base_model_version": "sdxl_base_v1-0", "format": "pt", "ss_tag_frequency": "{", "ss_network_dim": "nan",
}  # fmt: skip


def some_key(rng: random.Random, file: File) -> str:
    return rng.choice(sorted(file.tensors) or ["x"])


def spelled_otherwise(rng: random.Random, key: str) -> str:
    """The key with one of its names replaced, cut, doubled, moved or respelled."""
    parts = key.split(".")
    at = rng.randrange(len(parts))
    number = rng.choice(["007", "99999999999999999999", "-1", "1_0", "x", *WORDS])
    ways: tuple[Callable[[], str], ...] = (
        lambda: ".".join((*parts[:at], rng.choice(WORDS), *parts[at + 1 :])),
        lambda: ".".join((*parts[:at], *parts[at + 1 :])),
        lambda: ".".join((*parts[:at], parts[at], *parts[at:])),
        lambda: ".".join(rng.sample(parts, len(parts))),
        lambda: key[: rng.randrange(len(key) + 1)],
        lambda: key[rng.randrange(len(key) + 1) :],
        lambda: key.swapcase() if rng.random() < 0.5 else key.replace(".", "_"),
        lambda: key.replace("0", number, 1) if "0" in key else key.replace("1", number, 1),
        lambda: ".".join((*parts[:at], rng.choice(list(LEAVES)))),
        lambda: rng.choice(list(STEMS["flux"][0])) + "." + ".".join(parts[-2:]),
        lambda: rng.choice(["lora_unet_", "transformer.", "bundle_emb.", "_aux.", "unet:", "text_encoders.x."]) + key,
    )
    return rng.choice(ways)()


def rename(rng: random.Random, file: File) -> None:
    key = some_key(rng, file)
    if key in file.tensors:
        file.tensors[spelled_otherwise(rng, key)] = file.tensors.pop(key)


def double(rng: random.Random, file: File) -> None:
    key = some_key(rng, file)
    if key in file.tensors:
        file.tensors[spelled_otherwise(rng, key)] = file.tensors[key]


def drop(rng: random.Random, file: File) -> None:
    file.tensors.pop(some_key(rng, file), None)


def mix(rng: random.Random, file: File) -> None:
    other = rng.choice(seeds()).tensors
    file.tensors.update({key: other[key] for key in rng.sample(sorted(other), rng.randint(1, len(other)))})


def reshape(rng: random.Random, file: File) -> None:
    key = some_key(rng, file)
    held = file.tensors.get(key, torch.zeros(2, 2))
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: rand(*rng.choice(SHAPES)),
        lambda: rand(*rng.choice(SHAPES)),
        lambda: held.transpose(0, -1) if held.ndim else held,
        lambda: held.flatten(),
        lambda: held.reshape(*held.shape, *(1,) * rng.randint(1, 3)),
        lambda: held.unsqueeze(0),
        lambda: held[:-1] if held.ndim else held,
        lambda: torch.cat([held, held]) if held.ndim else held,
    )
    file.tensors[key] = rng.choice(ways)()


def retype(rng: random.Random, file: File) -> None:
    chosen = [some_key(rng, file)] if rng.random() < 0.7 else list(file.tensors)
    dtype = rng.choice(DTYPES)
    held = {key: file.tensors[key] for key in chosen if key in file.tensors}
    file.tensors.update({key: (t.real if t.is_complex() else t).to(dtype) for key, t in held.items()})


def value(rng: random.Random, file: File) -> None:
    key = some_key(rng, file)
    if key in file.tensors and file.tensors[key].is_floating_point():
        number = rng.choice([math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-45])
        spoilt = file.tensors[key].float().clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[: rng.choice([1, spoilt.numel()])] = number
        file.tensors[key] = spoilt


def alpha(rng: random.Random, file: File) -> None:
    stem = rng.choice([key.rsplit(".lora_", 1)[0].rsplit(".hada_", 1)[0] for key in file.tensors] or ["x"])
    own = [key for key in file.tensors if key.endswith("alpha")]
    file.tensors[rng.choice(own or [f"{stem}.alpha"])] = rng.choice(ALPHAS)()


def peft_fields(rng: random.Random) -> dict[str, Any]:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} if rng.random() < 0.6 else {}
    for name in rng.choices([*FIELDS, "r", "lora_alpha", "alpha_pattern", "rank_pattern"], k=rng.choice([1, 1, 2, 4])):
        config[name] = rng.choice(PATTERNS if "pattern" in name and rng.random() < 0.8 else VALUES)
    return config


def metadata(rng: random.Random, file: File) -> None:
    prefix = rng.choice(PREFIXES)
    own = {prefix + name: given for name, given in peft_fields(rng).items()}
    nested = rng.choice([json.dumps(own), json.dumps([own]), "[" * 50_000, '{"a":' * 50_000, "", "null", "{", "1e999"])
    file.metadata |= rng.choice([{"lora_adapter_metadata": nested}, {k: str(v) for k, v in own.items()}, {}])
    file.metadata |= dict(rng.sample(sorted(HEADERS.items()), rng.randint(0, 2)))


def config(rng: random.Random, file: File) -> None:
    text = json.dumps(peft_fields(rng))
    ways = [text, text, text, text, text[: rng.randrange(len(text))], "[" * 50_000, "null", "\ufeff" + text, "\x00", ""]
    file.config = rng.choice(ways)


ANYWHERE: tuple[Change, ...] = (
    *(rename, rename, double, drop, mix, reshape, reshape, retype, retype, value, value, alpha, alpha, alpha),
    *(metadata, metadata, config),
)


def header_field(rng: random.Random, file: File) -> None:
    head = file.parsed()
    entry = head.get(rng.choice(sorted(head) or ["x"]))
    if isinstance(entry, dict) and "dtype" in entry:
        start, stop = entry["data_offsets"] if isinstance(entry.get("data_offsets"), list) else (0, 4)
        spans = [
            [stop, start],
            [start, stop + 1],
            [start + 1, stop],
            [0, stop],
            [start],
            [],
            "0",
            None,
            {},
            [start] * 2,
        ]
        shapes = [[n, *rng.sample([1, 2, 3], 2)] for n in NUMBERS] + [[], [0], None, "2", 4, [[2]], [1] * 20_000]
        name, odd = rng.choice(
            [
                ("dtype", rng.choice(NAMES)),
                ("shape", rng.choice(shapes)),
                ("data_offsets", rng.choice([*spans, [rng.choice(NUMBERS), stop], [start, rng.choice(NUMBERS)]])),
                (rng.choice(["more", "dtype "]), 1),
            ]
        )
        entry[name] = odd
        if rng.random() < 0.1:
            del entry[rng.choice(sorted(entry))]


def header_entry(rng: random.Random, file: File) -> None:
    head = file.parsed()
    names = sorted(head) or ["x"]
    key, other = rng.choice(names), rng.choice(names)
    odd = [
        None,
        [],
        {},
        "x",
        4,
        {"dtype": "F32", "shape": [0, 2**60], "data_offsets": [0, 0]},
        deepcopy(head.get(other)),
    ]
    way = rng.randrange(4)
    if way == 0:
        head[spelled_otherwise(rng, key)] = head.pop(key, {})
    elif way == 1:
        head[rng.choice([key, "x", *WORDS])] = rng.choice(odd)
    elif way == 2:
        head["__metadata__"] = rng.choice(
            [None, [], "x", {"a": 1}, {"a": None}, {"a": {}}, {"lora_alpha": 4}, {"": ""}]
        )
    else:
        text = json.dumps(head)
        file.header = text[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice([head.get(key), *odd]))}}}"


def header_text(rng: random.Random, file: File) -> None:
    text = json.dumps(file.parsed())
    at = rng.randrange(len(text) + 1)
    ways: tuple[str | bytes, ...] = (
        *(
            "[]",
            "null",
            "1",
            '"x"',
            "{}",
            "",
            " " * 100,
            "[" * 50_000,
            '{"a":' * 50_000,
            "{" * 50_000,
            "NaN",
            "\ufeff" + text,
        ),
        *(text[:at], text[:at] + rng.choice(WORDS) + text[at:], text + "\x00", text + " " * 7, text.replace('"', "'")),
        *(text.encode()[:at] + bytes([rng.randrange(256)]) + text.encode()[at + 1 :], b"\xff" + text.encode()),
        *(text.replace("32", "1e2"), text.replace("[", "[[", 1), text.replace("}", "", 1), text.replace(",", ",,", 1)),
    )
    file.header = rng.choice(ways)


def bytes_around(rng: random.Random, file: File) -> None:
    share, noise = rng.random(), rng.randbytes(rng.choice([1, 8, 100, 5_000]))
    lengths = [0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 100_000_001, rng.randrange(3_000)]
    length = rng.choice(lengths).to_bytes(8, "little")
    ways: tuple[Callable[[bytes], bytes], ...] = (
        lambda data: data[: int(share * len(data))],
        lambda data: data[: rng.randrange(12)],
        lambda data: length + data[8:],
        lambda data: (int.from_bytes(data[:8], "little") + rng.choice([-1, 1, 8])).to_bytes(9, "little")[:8] + data[8:],
        lambda data: data + noise,
        lambda data: noise + data,
        lambda data: noise,
        lambda data: data[: int(share * len(data))] + noise + data[int(share * len(data)) + len(noise) :],
        lambda data: b"PK\x03\x04" + data[4:],
    )
    file.cut = rng.choice(ways)


ON_DISK: tuple[Change, ...] = (header_field, header_field, header_entry, header_text, bytes_around)


@dataclass(frozen=True)
class Case:
    """A mutated file, the pipeline that its seed was for, and how it is asked for."""

    pipeline: str
    file: File
    family: str | None
    component: str | None
    mode: str
    strict: bool


def case(number: int) -> Case:
    rng = random.Random(number)
    seed = rng.choice(seeds())
    file = File(dict(seed.tensors))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(ANYWHERE)(rng, file)
    if on_disk(number) and rng.random() < 0.7:
        rng.choice(ON_DISK)(rng, file)
    families = [None] * 60 + ["flux", "sd1", "flux|sd1", "", "nope", rng.choice(FAMILIES).name]
    components = [None] * 60 + ["transformer", "unet", "text_encoder", "nope"]
    return Case(
        seed.pipeline, file, rng.choice(families), rng.choice(components),
        rng.choice(["auto", "merged", "kernel"]), rng.random() < 0.5,
    )  # fmt: skip


def on_disk(number: int) -> bool:
    return number % 4 == 0


# ---- what must hold -------------------------------------------------------------------------------------------------


class HungError(BaseException):
    """A case that took too long; no `except Exception` of the library stops it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(3 * seconds)  # for code that does not come back to Python
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < seconds


@dataclass(frozen=True)
class Bench:
    """A pipeline that adapters are tried on, and what it was like before."""

    pipe: Any
    shapes: dict[str, dict[str, tuple[int, ...]]]
    before: dict[str, Tensor]

    def check(self) -> None:
        """Raises AssertionError if anything is other than before."""
        after = tiny.weights(self.pipe)
        assert after.keys() == self.before.keys()
        changed = [key for key, held in self.before.items() if not torch.equal(held, after[key])]
        assert changed == [], changed
        parts = [part for part in self.pipe.components.values() if isinstance(part, nn.Module)]
        assert not any("forward" in module.__dict__ for part in parts for module in part.modules())
        assert len(self.pipe.loras) == 0 and self.pipe.get_active_adapters() == []


@pytest.fixture(scope="module")
def benches() -> dict[str, Bench]:
    found = {}
    for name in STEMS:
        pipe = difflora.attach(tiny.BUILDERS[name]())
        parts = {n: part for n, part in pipe.components.items() if isinstance(part, nn.Module) and n != "vae"}
        shapes = {
            n: {key.removesuffix(".weight"): tuple(p.shape) for key, p in part.named_parameters()}
            for n, part in parts.items()
        }
        found[name] = Bench(pipe, shapes, tiny.weights(pipe))
    return found


def outcome(number: int, given: Case, benches: dict[str, Bench], folder: Path) -> tuple[str, int]:
    """(how far the case came, the size of its file); whatever is wrong is raised."""
    bench = benches[given.pipeline]
    options = {"family": given.family, "component": given.component}
    size, source = 0, given.file.tensors
    try:
        if on_disk(number):
            data = given.file.data
            size = len(data)
            source = folder / "adapter_model.safetensors"
            source.write_bytes(data)
            (folder / "adapter_config.json").unlink(missing_ok=True)
            if given.file.config is not None:
                (folder / "adapter_config.json").write_text(given.file.config, errors="surrogatepass")
            adapter = load(source, **options)
        else:
            configs = {} if given.file.config is None else {"": given.file.config}
            raw = Raw("case", "case", given.file.tensors, given.file.metadata, configs)
            adapter = normalise(raw, model=bench.shapes if number % 3 == 0 else None, **options)
    except DiffLoRAError as error:
        if not 20 < len(str(error)) < LONGEST_MESSAGE:
            raise AssertionError(f"a message of {len(str(error))} letters: {str(error)[:200]}") from error
        return "refused", size
    described = [(d.kind, d.rank, d.shape, d.needs_base) for ds in adapter.components.values() for d in ds.values()]
    assert described or adapter.vectors
    return (tried(bench, adapter, source, given, options) if number % 5 == 0 else "loaded"), size


def tried(bench: Bench, adapter: difflora.Adapter, source: Any, given: Case, options: dict[str, Any]) -> str:
    """`applied`, or `refused by the pipeline`; inspected and bound before, and unchanged after."""
    bound = False
    try:
        assert json.dumps(inspect_adapter(adapter).as_dict(), allow_nan=False)
        difflora.bind(adapter, bench.pipe)
        bound = True
        bench.pipe.load_lora(source, name="it", mode=given.mode, strict=given.strict, **options)
        bench.pipe.set_loras({"it": 0.5})
        found = "applied"
    except DiffLoRAError:
        found = "refused by the pipeline" if bound else "for another model"
    bench.pipe.unload_loras()
    bench.check()
    return found


def peak() -> int:
    """The most memory that this process held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Let the peak start at what is held now, where the system can do that."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


def hunt(numbers: range, benches: dict[str, Bench], folder: Path) -> Counter[str]:
    """The outcomes of cases; AssertionError names those that break a rule, by where they do."""
    forget_peak()
    start, largest = peak(), 0
    outcomes: Counter[str] = Counter()
    broken: dict[str, list[int]] = {}
    for number in numbers:
        given = case(number)
        try:
            with within(SECONDS):
                found, size = outcome(number, given, benches, folder)
            outcomes[("file: " if on_disk(number) else "tensors: ") + found] += 1
            largest = max(largest, size)
        except (Exception, HungError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} {str(error)[:120]!r} at {Path(where.filename).name}:{where.lineno}"
            broken.setdefault(what, []).append(number)
            benches[given.pipeline].pipe.unload_loras()
    report = "\n".join(f"{what}: cases {cases[:5]}, {len(cases)} in all" for what, cases in broken.items())
    assert not broken, report
    assert peak() - start <= 2 * largest + SPARE, f"the peak rose by {peak() - start >> 20} MiB"
    return outcomes


@pytest.mark.parametrize("mode", ["merged", "kernel"])
def test_files_that_are_not_mutated_load(benches: dict[str, Bench], mode: str) -> None:
    """The seeds are valid, so that what is refused is refused for its mutation."""
    for seed in seeds():
        bench = benches[seed.pipeline]
        report = bench.pipe.load_lora(seed.tensors, name="it", mode=mode)
        assert report.matched and not report.unmatched, seed.name
        bench.pipe.unload_loras()
    for bench in benches.values():
        bench.check()


HUGE: dict[str, Callable[[str], Tensors]] = {
    "LoRA": lambda s: pair(s, "lora_A.weight", "lora_B.weight", 200_000, 200_000),
    "DoRA": lambda s: HUGE["LoRA"](s) | {f"{s}.dora_scale": rand(200_000, 1)},
    "LoHa": lambda s: LINEAR["LoHa"](s, 200_000, 200_000),
    "LoKr": lambda s: {f"{s}.lokr_w1": rand(400, 400), f"{s}.lokr_w2": rand(400, 400)},
    "GLoRA": lambda s: LINEAR["GLoRA"](s, 200_000, 200_000),
    "IA3": lambda s: LINEAR["IA3"](s, 200_000, 0),
    "OFT": lambda s: {f"{s}.oft_blocks": rand(100_000, 2, 2)},
    "OFT v2": lambda s: {f"{s}.oft_R.weight": rand(100_000, 1)},
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_small_file_for_a_huge_weight_is_refused_in_little_memory(
    benches: dict[str, Bench], tmp_path: Path, kind: str
) -> None:
    bench = benches["flux"]
    tensors = HUGE[kind]("transformer.transformer_blocks.0.attn.to_q")
    data = File(tensors).data
    (tmp_path / "x.safetensors").write_bytes(data)
    forget_peak()
    start = peak()
    adapter = load(tmp_path / "x.safetensors")
    assert max(d.shape[0] or d.shape[1] for d in adapter.components["transformer"].values()) >= 160_000
    with within(SECONDS), pytest.raises(DiffLoRAError, match="another shape"):
        bench.pipe.load_lora(tmp_path / "x.safetensors")
    assert peak() - start <= 2 * len(data) + SPARE
    bench.check()


def test_mutated_files_load_or_are_refused(
    benches: dict[str, Bench], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcomes = hunt(range(SHORT), benches, tmp_path)
    record_property("outcomes", dict(outcomes))
    assert sum(outcomes.values()) == SHORT
    assert outcomes["tensors: refused"] > SHORT / 4 and outcomes["tensors: loaded"] > SHORT / 8
    assert outcomes["file: refused"] > SHORT / 20 and outcomes["file: applied"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_more_mutated_files(
    benches: dict[str, Bench], tmp_path: Path, shard: int, record_property: Callable[[str, object], None]
) -> None:
    length = LONG // SHARDS
    outcomes = hunt(range(length * shard, length * (shard + 1)), benches, tmp_path)
    record_property("outcomes", dict(outcomes))
    assert sum(outcomes.values()) == length
