"""FlashKernel in Transformers: as attn_implementation="fkernel", and with all fused modules for a while."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashkernel.integrations.transformers import accelerated  # importing it registers "fkernel"

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
).eval()
ids = torch.randint(512, (2, 12))
mask = torch.ones_like(ids)
mask[1, :5] = 0  # the second prompt is shorter, padded on the left

with torch.no_grad():
    stock = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("fkernel")  # or from_pretrained(..., attn_implementation="fkernel")
    ours = model(input_ids=ids, attention_mask=mask).logits
    with accelerated(model) as swapped:  # MLP, norms and RoPE too; put back at the end
        fused = model(input_ids=ids, attention_mask=mask).logits

visible = mask.bool()
torch.testing.assert_close(ours[visible], stock[visible], rtol=1e-4, atol=1e-4)
torch.testing.assert_close(fused[visible], stock[visible], rtol=1e-4, atol=1e-4)
print("logits agree; swapped:", swapped)
