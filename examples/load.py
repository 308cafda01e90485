"""Load an adapter, see what it did, draw with it and without it, and take it out again."""

import torch

import difflora
import difflora.demo

pipe = difflora.attach(difflora.demo.load())  # any diffusers pipeline; here the small one that ships with difflora
report = pipe.load_lora("outline", weight=0.9)  # a file, a folder, "user/repo", a state dict, a bundled name
print(report)


def draw(name: str) -> None:
    seed = torch.Generator().manual_seed(1)
    pipe("a red circle", num_inference_steps=16, generator=seed).images[0].save(name)


draw("with-outline.png")
pipe.unload_lora("outline")  # the weights are bit-identical to before
draw("without.png")
