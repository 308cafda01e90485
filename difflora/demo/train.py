"""Train the bundled model and its adapters: `python -m difflora.demo.train --what all --out DIR`."""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from difflora.demo.adapt import RECIPES, Recipe, train_adapter
from difflora.demo.autoencoder import latents, train_autoencoder
from difflora.demo.data import Drawings, distracted, drawings, tokens
from difflora.demo.distil import distil_variants, teacher_paths
from difflora.demo.evaluate import adapter_path, evaluate, open_pipeline
from difflora.demo.flow import Samples, flow_variants, train_base
from difflora.demo.loop import Loop
from difflora.demo.model import FULL, TINY, Size, build
from difflora.demo.shapes import BASE_SHAPES, STYLES, captions

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much of everything; `fast` pictures per step are walked over four steps each."""

    size: Size
    base_steps: int
    vae_steps: int
    adapter_steps: int
    fast_steps: int
    batch: int  # of the base model; the other stages take a quarter
    drawings: int
    paths: int
    scored: int
    shift: float = 0.5


PLAN = Plan(FULL, 15_000, 2400, 3000, 8000, 1024, 80_000, 20_000, 600)
SMOKE = Plan(TINY, 8, 8, 4, 3, 32, 64, 12, 6)


@dataclass(frozen=True)
class Run:
    """One invocation: the plan, the output folder, the device, and where progress lines go."""

    plan: Plan
    out: Path
    device: str
    seed: int
    say: Say
    start: Path | None = None  # a saved pipeline to go on from instead of random weights
    seconds: float = math.inf  # time limit of the base model's training
    only: Sequence[str] = tuple(RECIPES)  # the adapters to train

    def loop(self, steps: int, rate: float, average: float = 0.0) -> Loop:
        """The optimisation settings of one stage; its time limit is in proportion to its steps."""
        limit = self.seconds * steps / self.plan.base_steps
        return Loop(steps, rate, self.device, self.say, average, limit)


def images_of(part: Drawings, device: str) -> torch.Tensor:
    """uint8 `[n, 3, SIDE, SIDE]` on the device."""
    return torch.from_numpy(part.pixels).to(device).permute(0, 3, 1, 2).contiguous()


def samples_of(pipe: Any, part: Drawings, run: Run) -> Samples:
    """Latents and prompts of a set of drawings."""
    texts = distracted([entry.text for entry in part.captions], run.seed)
    empty = tokens(pipe, [""], run.device)
    return Samples(latents(pipe.vae, images_of(part, run.device)), tokens(pipe, texts, run.device), empty)


def make_base(run: Run) -> None:
    """Train the autoencoder, then the transformer and the text encoders; save them as `flux` in the output folder."""
    plan = run.plan
    plain = drawings(plan.drawings, run.seed, BASE_SHAPES)
    every_shape = (*BASE_SHAPES, "heart")
    styled = [drawings(plan.drawings // 8, run.seed + 1, every_shape, style) for style in STYLES]
    pipe = start_of(run)
    run.say(f"drew {len(plain.captions)} pictures")
    mixed = torch.cat([images_of(part, run.device) for part in (plain, *styled)])
    train_autoencoder(pipe.vae, mixed, plan.batch // 4, run.loop(plan.vae_steps, 1.5e-3))
    train_base(pipe, samples_of(pipe, plain, run), plan.batch, run.loop(plan.base_steps, 1.2e-3, average=0.999))
    save(pipe, run.out / "flux")


def start_of(run: Run) -> Any:
    """The pipeline that training begins with."""
    if run.start is None:
        return build(run.plan.size, run.seed, run.plan.shift).to(run.device)
    pipe = open_pipeline(run.start, run.device)
    pipe.scheduler.register_to_config(shift=run.plan.shift)
    for part in (pipe.vae, pipe.transformer):
        part.register_to_config(_name_or_path="")  # not the folder it came from
    return pipe


def save(pipe: Any, folder: Path) -> None:
    """Write the pipeline with the transformer and the autoencoder in float16.

    The text encoders stay float32: transformers opens a model in the type it is stored in, diffusers in float32.
    """
    pipe.to("cpu")
    for part in (pipe.vae, pipe.transformer):
        for weight in part.parameters():
            weight.data = weight.data.to(torch.float16)
    pipe.save_pretrained(folder)


def make_style(run: Run, name: str, recipe: Recipe) -> None:
    """Train an adapter on drawings in its style and of its shapes."""
    pipe = open_pipeline(run.out / "flux", run.device)
    torch.manual_seed(run.seed)
    samples = samples_of(pipe, drawings(run.plan.drawings // 3, run.seed + 2, recipe.shapes, recipe.style), run)
    batch = run.plan.batch // 4
    loop = run.loop(run.plan.adapter_steps, 2e-3)
    train_adapter(pipe, recipe, loop, flow_variants(pipe, samples, batch), adapter_path(run.out, name))


def make_fast(run: Run, name: str, recipe: Recipe) -> None:
    """Distil the base model's many steps into an adapter for four."""
    pipe = open_pipeline(run.out / "flux", run.device)
    torch.manual_seed(run.seed)
    what = captions(run.plan.paths, run.seed + 3)
    prompts = tokens(pipe, distracted([entry.text for entry in what], run.seed), run.device)
    paths = teacher_paths(pipe, prompts, what, run.plan.batch)
    run.say(f"teacher: {len(paths.states)} of {len(what)} paths end in a clean picture of the caption")
    batch = run.plan.batch // 4
    loop = run.loop(run.plan.fast_steps, 1.5e-3)
    train_adapter(pipe, recipe, loop, distil_variants(pipe, paths, batch), adapter_path(run.out, name))


def make_adapters(run: Run) -> None:
    """Train the chosen adapters on the model in the output folder."""
    for name in run.only:
        recipe = RECIPES[name]
        (make_fast if name == "fast" else make_style)(run, name, recipe)


def make_scores(run: Run) -> None:
    """Measure the model and the adapters in the output folder; write and show `scores.json`."""
    text = json.dumps(evaluate(run.out, run.device, run.plan.scored), indent=2)
    (run.out / "scores.json").write_text(text + "\n")
    run.say(text)


STAGES: dict[str, tuple[Callable[[Run], None], ...]] = {
    "base": (make_base,),
    "adapters": (make_adapters,),
    "evaluate": (make_scores,),
    "all": (make_base, make_adapters, make_scores),
}


def scaled(plan: Plan, steps: int) -> Plan:
    """The plan with `steps` for the base model and the other stages in proportion."""
    share = steps / plan.base_steps
    return replace(
        plan,
        base_steps=steps,
        vae_steps=max(1, round(plan.vae_steps * share)),
        adapter_steps=max(1, round(plan.adapter_steps * share)),
        fast_steps=max(1, round(plan.fast_steps * share)),
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m difflora.demo.train", description=__doc__)
    parser.add_argument("--what", choices=list(STAGES), default="all")
    parser.add_argument("--out", type=Path, required=True, help="folder for flux/, adapters/ and scores.json")
    parser.add_argument("--steps", type=int, help="steps of the base model; the other stages follow in proportion")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit of the base model, likewise")
    parser.add_argument("--start", type=Path, help="folder of a saved pipeline that the base model goes on from")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="adapters to train")
    parser.add_argument("--batch", type=int, help="pictures per step of the base model")
    parser.add_argument("--drawings", type=int, help="pictures to draw for the base model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a smoke run: seconds on two cores, useless weights")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the stages that the command line names."""
    options = parse(arguments)
    plan = SMOKE if options.tiny else PLAN
    plan = scaled(plan, options.steps) if options.steps else plan
    chosen = {key: getattr(options, key) for key in ("batch", "drawings") if getattr(options, key)}
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass failed at these head sizes (torch 2.11, H200)

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f}] {line}", flush=True)

    places = {"out": options.out, "device": options.device, "start": options.start}
    run = Run(replace(plan, **chosen), seed=options.seed, say=say, seconds=options.seconds, only=options.only, **places)
    run.out.mkdir(parents=True, exist_ok=True)
    for stage in STAGES[options.what]:
        stage(run)


if __name__ == "__main__":
    main()
