"""Files of adapters, without any model: another layout, one file from several, a smaller rank, a baked checkpoint."""

import difflora
import difflora.demo
from difflora.baking import bake
from difflora.extracting import extract
from difflora.mixing import merge
from difflora.resizing import resize

outline, stripes = difflora.load("outline"), difflora.load("stripes")

# What other programs read: "kohya" (A1111, Forge), "comfy", "diffusers", "peft" (a folder).
outline.save("outline-kohya.safetensors", "kohya")
outline.save("outline-peft", "peft")

# The exact sum has the rank of both; "svd" is the best of a smaller one.  A ratio is a strength.
both, _ = merge([(outline, 0.7), (stripes, 0.5)])
both.save("both.safetensors")
smaller, told = resize(outline, rank=2)
smaller.save("outline-rank2.safetensors")
print(f"rank 2 keeps at least {min(one.retained for one in told.values()):.1%} of every change")

# Into a model's files, and out of them again.
pipe = difflora.demo.load()
pipe.save_pretrained("model")
done = bake("model", [(outline, 0.7)], "model-with-outline")
print(f"{done.parameters} parameters of {done.path} changed")
found, _ = extract("model/transformer", "model-with-outline/transformer", rank=16)
print(len(found.components["transformer"]), "modules differ")
