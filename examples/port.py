"""A script written for diffusers' own LoRA methods: the one new line is marked."""

import torch

import difflora
import difflora.demo

pipe = difflora.demo.load()
difflora.attach(pipe)  # the new line

pipe.load_lora_weights(difflora.demo.ADAPTERS["stripes"], adapter_name="stripes")
pipe.load_lora_weights(difflora.demo.ADAPTERS["night"], adapter_name="night")
pipe.set_adapters(["stripes", "night"], adapter_weights=[0.8, 0.5])
seed = torch.Generator().manual_seed(3)
picture = pipe("a green square", num_inference_steps=16, generator=seed, joint_attention_kwargs={"scale": 0.9}).images[
    0
]
picture.save("ported.png")
print(pipe.get_active_adapters(), pipe.get_list_adapters())
pipe.unload_lora_weights()
