"""Generate with a FoX and a cache that drops what the forget gates have forgotten."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longctx  # noqa: F401 - registers FoX with the Auto classes
from hf_longctx.corpus import load_tokens
from hf_longctx.fox import PrunedCache


MODEL = "model_cards/fox-demo"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
prompt = torch.tensor(load_tokens(tokenizer, "stdlib").tokens[:2000])[None]

cache = PrunedCache(model, tolerance=1e-4)  # each head loses at most this share of its attention weight
output = model.generate(prompt, max_new_tokens=50, do_sample=False, cache=cache)

print(tokenizer.decode(output[0, prompt.shape[1] :]))
dropped = cache.dropped.float().mean() / cache.get_seq_length()
print(f"{cache.get_seq_length()} tokens were read; the average head has dropped {dropped:.0%} of them")
