"""Synthetic adapter files, and beside each what it means: the change of every parameter, by plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")
BARE = ("lora_A", "lora_B")
DOTTED = ("lora.down.weight", "lora.up.weight")
SLOT = ("lora_A.default.weight", "lora_B.default.weight")


@dataclass(eq=False)
class File:
    """A file in the making for the models of `pipe`.

    `tensors` is what is in it; `changes` the differences that it means, by component and parameter name; `values` the
    parameters that it replaces.  Of a model on the meta device nothing is computed.
    """

    pipe: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)
    changes: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def random(self, *shape: int) -> Tensor:
        """Normal numbers of spread 0.3, other ones at each call."""
        return torch.randn(*shape, generator=self.generator) * 0.3

    def module(self, path: str) -> tuple[str, Any]:
        """The name with its component, and the module, of a path: in the denoiser unless it names a text encoder."""
        component, _, rest = path.partition(".")
        if component not in self.pipe.components:
            component, rest = ("unet" if self.pipe.unet is not None else "transformer"), path
        model = self.pipe.components[component]
        here = dict(model.named_modules())
        # transformers 5 dropped this level from CLIPTextModel.
        name = next(name for name in (rest, rest.removeprefix("text_model.")) if name in here)
        return f"{component}.{name}", here[name]

    def shape(self, *paths: str) -> tuple[int, ...]:
        """The shape of the weights of these modules, one above the other."""
        shapes = [tuple(self.module(path)[1].weight.shape) for path in paths]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def add(self, full: Tensor, *paths: str, swap: bool = False) -> None:
        """The change `full` of these modules, one above the other; `swap`: the file has the two halves of its rows
        the other way round."""
        if swap:
            full = torch.cat(full.chunk(2)[::-1])
        heights = [self.shape(path)[0] for path in paths]
        for path, rows in zip(paths, full.split(heights), strict=True):
            self.changes[f"{self.module(path)[0]}.weight"] = rows

    def alpha(self, stem: str, alpha: Any) -> None:
        if alpha is not None:
            self.tensors[f"{stem}.alpha"] = torch.as_tensor(alpha)

    def pair(self, stem: str, *paths: str, rank: int = 3, leaves: tuple[str, str] = PEFT) -> Tensor:
        """Random factors in the file; B A."""
        out, *rest = self.shape(*paths)
        down = self.random(rank, *rest)
        up = self.random(out, rank, *(1 for _ in rest[1:]))
        self.tensors |= {f"{stem}.{leaves[0]}": down, f"{stem}.{leaves[1]}": up}
        device = self.module(paths[0])[1].weight.device
        a, b = (factor.to(device, torch.float64).flatten(1) for factor in (down, up))
        return (b @ a).reshape(out, *rest)

    def lora(
        self, stem: str, *paths: str, rank: int = 3, alpha: Any = None, leaves: tuple[str, str] = PEFT,
        swap: bool = False,
    ) -> None:  # fmt: skip
        """alpha / rank * B A, without alpha B A; the rows go to the modules in turn."""
        product = self.pair(stem, *paths, rank=rank, leaves=leaves)
        self.alpha(stem, alpha)
        self.add(product * (1.0 if alpha is None else float(alpha) / rank), *paths, swap=swap)

    def dora(self, stem: str, path: str, alpha: float | None = None, leaves: tuple[str, str] = PEFT) -> None:
        """m (W + D) / |W + D| - W, the norm by rows."""
        delta = self.pair(stem, path, leaves=leaves) * (1.0 if alpha is None else alpha / 3)
        self.alpha(stem, alpha)
        weight = self.module(path)[1].weight.detach().double()
        new = (weight + delta).flatten(1)
        scale = self.random(len(weight), *(1,) * (weight.ndim - 1)).abs() + 1.0
        self.tensors[f"{stem}.dora_scale"] = scale
        self.add((scale.double().flatten(1) * new / new.norm(dim=1, keepdim=True)).reshape(weight.shape) - weight, path)

    def loha(self, stem: str, *paths: str, rank: int = 3, alpha: float = 1.5) -> None:
        """alpha / rank * (A1 B1) * (A2 B2), element by element."""
        out, *rest = self.shape(*paths)
        width = torch.Size(rest).numel()
        halves = []
        for n in "12":
            a, b = self.random(out, rank), self.random(rank, width)
            self.tensors |= {f"{stem}.hada_w{n}_a": a, f"{stem}.hada_w{n}_b": b}
            halves.append(a.double() @ b.double())
        self.alpha(stem, alpha)
        self.add((halves[0] * halves[1] * alpha / rank).reshape(out, *rest), *paths)

    def lokr(self, stem: str, *paths: str, factor: int = 2, rank: int | None = 3, alpha: float | None = 1.5) -> None:
        """alpha / rank * kron(w1, w2), w2 of this rank; of none: both whole, and no scale."""
        out, width = self.shape(*paths)
        one = self.random(factor, factor)
        self.tensors[f"{stem}.lokr_w1"] = one
        if rank is None:
            two = self.random(out // factor, width // factor)
            self.tensors[f"{stem}.lokr_w2"] = two
        else:
            a, b = self.random(out // factor, rank), self.random(rank, width // factor)
            self.tensors |= {f"{stem}.lokr_w2_a": a, f"{stem}.lokr_w2_b": b}
            two = a.double() @ b.double()
        self.alpha(stem, alpha)
        scale = 1.0 if rank is None or alpha is None else alpha / rank
        self.add(torch.kron(one.double(), two.double()) * scale, *paths)

    def tucker(self, stem: str, path: str, rank: int = 3, alpha: float = 1.5) -> None:
        """alpha / rank * sum_mn up[o, m] mid[m, n, h, w] down[n, i], of a convolution."""
        out, width, *kernel = self.shape(path)
        down, up, mid = self.random(rank, width, 1, 1), self.random(out, rank, 1, 1), self.random(rank, rank, *kernel)
        self.tensors |= {f"{stem}.lora_{n}.weight": t for n, t in (("down", down), ("up", up), ("mid", mid))}
        self.alpha(stem, alpha)
        parts = (up.double()[..., 0, 0], mid.double(), down.double()[..., 0, 0])
        self.add(torch.einsum("om,mnhw,ni->oihw", *parts) * alpha / rank, path)

    def oft(self, stem: str, path: str, size: int = 4) -> None:
        """R' W - W, blocks R = (I + Q)(I - Q)^-1 with Q = B - B' on the rows; the alpha 0 is no constraint.

        LyCORIS 4.1, functional/diag_oft.py: "k n m, k n ... -> k m ...".
        """
        weight = self.module(path)[1].weight.detach().double()
        blocks = self.random(len(weight) // size, size, size) / 3
        self.tensors[f"{stem}.oft_blocks"] = blocks
        self.alpha(stem, 0.0)
        q = blocks.double() - blocks.double().mT
        eye = torch.eye(size, dtype=torch.float64)
        turned = ((eye + q) @ (eye - q).inverse()).mT @ weight.reshape(len(blocks), size, -1)
        self.add(turned.reshape(weight.shape) - weight, path)

    def diff(self, key: str, parameter: str) -> None:
        """A difference of a whole parameter (`path.weight`, `path.bias`, `path.scale_shift_table`)."""
        path, _, leaf = parameter.rpartition(".")
        name, module = self.module(path)
        self.tensors[key] = self.random(*getattr(module, leaf).shape)
        self.changes[f"{name}.{leaf}"] = self.tensors[key].double()

    def bias(self, key: str, path: str) -> None:
        """A difference of the bias beside factors of scale 1."""
        self.diff(key, f"{path}.bias")

    def value(self, key: str, path: str) -> None:
        """A new weight in the place of the old one."""
        name, module = self.module(path)
        self.tensors[key] = self.random(*module.weight.shape) + 1.0
        self.values[f"{name}.weight"] = self.tensors[key]

    def word(self, key: str, component: str, count: int = 2) -> None:
        """Textual-inversion vectors: new last rows of the table of a text encoder."""
        model = self.pipe.components[component]
        table = model.get_input_embeddings()
        self.tensors[key] = self.random(count, table.embedding_dim)
        name = next(name for name, module in model.named_modules() if module is table)
        self.values[f"{component}.{name}.weight"] = torch.cat([table.weight.detach(), self.tensors[key]])
