"""Kernel mode on a whole denoiser with random weights: base, diffusers + PEFT and difflora in one process.

    python tests/benchmarks/transformer.py OUT.json [eager] [compiled] [batch] [changes] [merged]

FLUX.1-dev's shape from its published config, bf16, adapters on all 494 linear layers of the blocks.  Outputs are
compared with an fp32 model whose weights hold the adapters before anything is timed; times are medians of CUDA events.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
import triton
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

import difflora
from difflora import linear, ranks, surface
from difflora.deltas import LowRank
from difflora.kernels import merging
from difflora.ranks import Part

# black-forest-labs/FLUX.1-dev, transformer/config.json
CONFIG = {
    **{"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24},
    **{"in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True},
}
DEVICE = torch.device("cuda")
SETS = {"one r=64": (64,), "three r=16+64+32": (16, 64, 32)}


def model() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    with torch.device("meta"):
        made = FluxTransformer2DModel(**CONFIG).to(torch.bfloat16)
    made = made.to_empty(device=DEVICE).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        # Norms multiply by about 1, everything else is small, as in a trained model.
        parameter.fill_(1.0) if "norm_" in name and parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    return made


def layers(transformer: nn.Module) -> dict[str, nn.Linear]:
    found = transformer.named_modules()
    return {path: m for path, m in found if isinstance(m, nn.Linear) and "transformer_blocks." in path}


def adapter(transformer: nn.Module, rank: int, seed: int, device: torch.device = DEVICE) -> dict[str, Tensor]:
    made = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, module in layers(transformer).items():
        for name, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
            size = 1 / shape[1] ** 0.5 if name == "A" else 0.02
            tensor = torch.randn(shape, generator=made, device=device) * size
            tensors[f"transformer.{path}.lora_{name}.weight"] = tensor.bfloat16()
    return tensors


def inputs(batch: int = 1) -> dict[str, Any]:
    made = torch.Generator(DEVICE).manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=DEVICE).bfloat16()

    return {
        **{"hidden_states": draw(batch, 4096, 64), "encoder_hidden_states": draw(batch, 512, 4096)},
        **{"pooled_projections": draw(batch, 768), "timestep": torch.full((batch,), 0.5, device=DEVICE).bfloat16()},
        **{"img_ids": torch.zeros(4096, 3, device=DEVICE), "txt_ids": torch.zeros(512, 3, device=DEVICE)},
        **{"guidance": torch.full((batch,), 3.5, device=DEVICE), "return_dict": False},
    }


def timed(run: Callable[[], Any], repeats: int = 12) -> float:
    """Median milliseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def clocked(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median milliseconds of the host's clock, up to the device's end."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[len(times) // 2]


def pipeline(transformer: nn.Module) -> Any:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), transformer=transformer, **parts)


def truth(transformer: nn.Module, adapters: Sequence[dict[str, Tensor]]) -> Tensor:
    """The output in fp32 of the model with the adapters inside."""
    with torch.device("meta"):
        wide = FluxTransformer2DModel(**CONFIG)
    wide = wide.to_empty(device=DEVICE).eval()
    wide.load_state_dict({k: v.float() for k, v in transformer.state_dict().items()})
    for path, module in layers(wide).items():
        for one in adapters:
            a, b = (one[f"transformer.{path}.lora_{name}.weight"].float() for name in "AB")
            module.weight.data.addmm_(b, a)
    given = {k: v.float() if isinstance(v, Tensor) else v for k, v in inputs().items()}
    out = wide(**given)[0]
    del wide
    gc.collect()
    torch.cuda.empty_cache()
    return out


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def rows(record: dict[str, Any], compiled: bool) -> None:
    """Base, peer and ours for each set of adapters."""
    kind = "compiled" if compiled else "eager"
    given = inputs()
    record[f"base {kind}"] = _base(given, compiled)
    say(record, f"base {kind}")
    for name, sizes in SETS.items():
        for who in ("peft", "difflora"):
            transformer = model()
            adapters = [adapter(transformer, rank, n) for n, rank in enumerate(sizes)]
            if not compiled and who == "peft":
                wanted = truth(transformer, adapters)
            if who == "peft":
                for n, one in enumerate(adapters):
                    transformer.load_lora_adapter(one, prefix="transformer", adapter_name=f"a{n}")
                transformer.set_adapters([f"a{n}" for n in range(len(adapters))], [1.0] * len(adapters))
            else:
                pipe = difflora.attach(pipeline(transformer), max_rank=128)
                for n, one in enumerate(adapters):
                    pipe.load_lora(one, name=f"a{n}", mode="kernel")
            if compiled:
                transformer.compile_repeated_blocks(fullgraph=True)
            out = transformer(**given)[0]
            if not compiled:
                record[f"{who} {name} error"] = error(out, wanted)
            record[f"{who} {kind} {name}"] = timed(lambda t=transformer: t(**given))
            over = record[f"{who} {kind} {name}"] / record[f"base {kind}"] - 1
            record[f"{who} {kind} {name} over"] = over
            say(record, f"{who} {kind} {name}", f"{over:+.1%}", f"error {record.get(f'{who} {name} error')}")
            del transformer, adapters
            pipe = None
            gc.collect()
            torch.cuda.empty_cache()


def _base(given: dict[str, Any], compiled: bool) -> float:
    transformer = model()
    if compiled:
        transformer.compile_repeated_blocks(fullgraph=True)
    return timed(lambda: transformer(**given))


def batch(record: dict[str, Any]) -> None:
    """Eight images in one batch, each with an adapter of its own of rank 16 to 64."""
    given = inputs(8)
    transformer = model()
    record["base batch 8"] = timed(lambda: transformer(**given), 5)
    modules = dict(layers(transformer))
    room = ranks.arena(linear.shapes(modules, transformer), 8 * 4, 8, 8)
    sizes = [16, 32, 48, 64, 16, 32, 48, 64]
    adapters = [adapter(transformer, rank, n) for n, rank in enumerate(sizes)]
    parts: dict[Any, list[list[Part]]] = {path: [] for path in modules}
    for one in adapters:
        for path, module in modules.items():
            a, b = (one[f"transformer.{path}.lora_{name}.weight"] for name in "AB")
            parts[path].append([Part(LowRank(down=a, up=b), (a,), len(a), 0, module.out_features, 1.0)])
    room.fill(parts)
    room.spread(range(8))
    for path, module in modules.items():
        linear.patch(module, (), module.out_features, room.sites[path])
    out = transformer(**given)[0]
    for n in (0, 3):
        wanted = truth_of_row(transformer, room, adapters[n], given, n)
        record[f"batch row {n} error"] = error(out[n : n + 1], wanted.float())
    room.spread(range(8))
    record["difflora batch 8"] = timed(lambda: transformer(**given), 5)
    record["difflora batch 8 over"] = record["difflora batch 8"] / record["base batch 8"] - 1
    say(record, "base batch 8")
    say(
        record,
        "difflora batch 8",
        f"{record['difflora batch 8 over']:+.1%}",
        f"errors {record['batch row 0 error']:.4f}",
    )


def truth_of_row(transformer: nn.Module, room: Any, one: dict[str, Tensor], given: dict[str, Any], n: int) -> Tensor:
    """The row alone, with its adapter as the only one: one request for all rows."""
    room.spread([n])
    single = {k: v[n : n + 1] if isinstance(v, Tensor) and not k.endswith("ids") else v for k, v in given.items()}
    out: Tensor = transformer(**single)[0]
    return out


def changes(record: dict[str, Any]) -> None:
    """Strengths, loading, and adapters that are loaded and do not act."""
    given = inputs()
    transformer = model()
    host = [adapter(transformer, 64, n, torch.device("cpu")) for n in range(2)]
    size = sum(t.numel() * 2 for t in host[0].values())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    record["H2D limit r=64"] = clocked(lambda: pinned.to(DEVICE, non_blocking=True))
    pipe = difflora.attach(pipeline(transformer), max_rank=128)
    record["base, reserved"] = timed(lambda: transformer(**given))

    def load() -> None:
        pipe.load_lora(host[0], name="a", mode="kernel")

    def reload() -> None:
        pipe.unload_lora("a")
        load()

    load()
    record["difflora unload + load r=64"] = clocked(reload)
    pipe.load_lora(host[1], name="b", mode="kernel")
    strengths = iter(range(1, 1000))
    record["difflora set_loras"] = clocked(lambda: pipe.set_loras({"a": 1 / next(strengths), "b": 0.5}), 10)
    room = surface.engine_behind(pipe).executor.rooms["transformer"]

    def write() -> None:
        for table in room.tables.values():
            table.there.copy_(table.here, non_blocking=True)

    record["tables to the device"] = clocked(write, 10)
    pipe.set_loras({})
    for n in range(2, 12):
        pipe.load_lora(host[0], name=f"more{n}", mode="kernel", weight=0.0)
    record["12 loaded, none acts"] = timed(lambda: transformer(**given))
    for name in ("H2D limit r=64", "difflora unload + load r=64", "difflora set_loras", "tables to the device"):
        say(record, name)
    say(record, "base, reserved")
    say(record, "12 loaded, none acts")
    peer = model()
    record["peft load r=64"] = clocked(
        lambda: peer.load_lora_adapter(host[0], prefix="transformer", adapter_name=f"p{next(strengths)}"), 3
    )
    say(record, "peft load r=64")


def merged(record: dict[str, Any]) -> None:
    """Switching merged weights: the kernel at several tile sizes beside a copy of the bytes, and the whole call."""
    transformer = model()
    modules = list(layers(transformer).items())
    bases = [module.weight.detach().clone() for _, module in modules]
    size = sum(base.numel() * 2 for base in bases)
    record["bytes of the weights"] = size
    weights = [module.weight for _, module in modules]
    record["copy limit"] = timed(functools.partial(torch._foreach_copy_, weights, bases))
    say(record, "copy limit", f"{2 * size / record['copy limit'] / 1e9:.2f} TB/s")
    for name, sizes in {"r=64": (64,), "r=16": (16,), "r=128": (128,), "r=16+64+32": (16, 64, 32)}.items():
        adapters = [adapter(transformer, rank, n) for n, rank in enumerate(sizes)]
        jobs = [
            merging.Job(
                module.weight.data,
                base,
                tuple(
                    merging.Part(
                        *(one[f"transformer.{path}.lora_{x}.weight"] for x in "AB"), 0, module.out_features, 0.5
                    )
                    for one in adapters
                ),
            )
            for (path, module), base in zip(modules, bases, strict=True)
        ]
        merging.merge(jobs)
        for n in (0, 40, 200):
            wide = bases[n].float()
            for part in jobs[n].parts:
                wide = wide + 0.5 * part.b.float() @ part.a.float()
            usual = 2 * float((wide.bfloat16().float() - wide).norm())
            assert float((jobs[n].weight.float() - wide).norm()) <= usual, (name, n)
        for config in CONFIGS if len(sizes) == 1 and sizes[0] <= 64 else MORE:
            try:
                record[f"merge {name} {config}"] = _replayed(jobs, config)
            except Exception as error:
                record[f"merge {name} {config}"] = 1e9
                print(config, str(error)[:100])
        best = min((v, k) for k, v in record.items() if k.startswith(f"merge {name} "))
        record[f"merge {name}"] = _replayed(jobs, ())
        record[f"merge {name} over the copy"] = record[f"merge {name}"] / record["copy limit"]
        say(record, f"merge {name}", f"{record[f'merge {name} over the copy']:.2f} x copy, best {best}")
        del jobs, adapters
        torch.cuda.empty_cache()
    del bases
    pipe = difflora.attach(pipeline(transformer))
    for n in range(2):
        pipe.load_lora(adapter(transformer, 64, n), name=f"a{n}", weight=0.0, mode="merged")
    turns = iter(range(1000))
    record["set_loras, merged, r=64"] = clocked(lambda: pipe.set_loras({f"a{next(turns) % 2}": 1.0}), 5)
    say(record, "set_loras, merged, r=64")


CONFIGS = (
    *((128, 64, 64, 3, 8), (128, 128, 64, 3, 8), (128, 64, 64, 2, 4)),
    *((64, 128, 64, 3, 4), (64, 128, 64, 3, 8), (256, 64, 64, 3, 8)),
)
MORE = ((64, 64, 64, 2, 4), (64, 64, 32, 3, 4), (128, 64, 64, 2, 8), (64, 128, 32, 2, 8))


def _replayed(jobs: Any, config: tuple[int, ...]) -> float:
    """Milliseconds of the kernel alone: the tables are made once."""
    launched: list[Callable[[], Any]] = []
    merging.merge(jobs, config, launched.append)
    return timed(lambda: [run() for run in launched])


def say(record: dict[str, Any], name: str, *more: str) -> None:
    print(f"{name:40s} {record[name]:9.3f} ms", *more, flush=True)


PARTS = {
    "eager": lambda record: rows(record, False),
    "compiled": lambda record: rows(record, True),
    "batch": batch,
    "changes": changes,
    "merged": merged,
}


@torch.no_grad()
def main(out: str, wanted: Sequence[str]) -> None:
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    versions |= {"diffusers": diffusers.__version__, "peft": peft.__version__}
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), **versions}
    for name in wanted or PARTS:
        PARTS[name](record)
        Path(out).write_text(json.dumps(record, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
