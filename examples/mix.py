"""Mix adapters: a weight each, per component or per block."""

import torch

import difflora
import difflora.demo

pipe = difflora.attach(difflora.demo.load())
pipe.load_lora("outline", 0.7)
pipe.load_lora("stripes", 0.5)
print(pipe.loras)

for name, weights in {
    "both": {"outline": 0.7, "stripes": 0.5},
    "blocks": {"outline": {"transformer_blocks.0-1": 0.2}, "stripes": 1.0},
    "base": {},
}.items():
    pipe.set_loras(weights)  # exactly these
    seed = torch.Generator().manual_seed(1)
    pipe("a blue square", num_inference_steps=16, generator=seed).images[0].save(f"mix-{name}.png")

# The exact weighted sum as one adapter, without any model.
total = difflora.compose([(difflora.load("outline"), 0.7), (difflora.load("stripes"), 0.5)])
print(total.name, sum(len(deltas) for deltas in total.components.values()), "modules")
