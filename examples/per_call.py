"""Adapters for one call only, by argument or by tag in the prompt."""

import torch

import difflora
import difflora.demo

pipe = difflora.attach(difflora.demo.load())
pipe.load_lora("night", 0.0)  # loaded, not active
pipe.load_lora("fast", 1.0, mode="kernel")  # beside the weights instead of inside them


def draw(name: str, prompt: str, **options: object) -> None:
    seed = torch.Generator().manual_seed(2)
    pipe(prompt, num_inference_steps=4, generator=seed, **options).images[0].save(name)


draw("active.png", "a yellow star")  # the active set: fast
draw("call.png", "a yellow star", loras={"fast": 1.0, "night": 0.8})  # exactly these, for this call
draw("tag.png", "a yellow star <lora:night:0.8>")  # the active set and what the tag adds
draw("base.png", "a yellow star", loras={})  # the base alone
