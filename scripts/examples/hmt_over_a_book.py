"""Read a book into the memory of an HMT, save the memory, and continue the book from it."""

import tempfile

from transformers import AutoTokenizer

from hf_longctx import HMTConfig, HMTWrapper
from hf_longctx.corpus import load_text
from hf_longctx.hmt.reading import load_state, read_text


BACKBONE = "model_cards/llama-demo"  # any causal language model
BOOK = load_text("stdlib")[:8_000]

tokenizer = AutoTokenizer.from_pretrained(BACKBONE)
# A neural cache of all tokens read needs no training; recalled embeddings do (see the recipe "hmt").
config = HMTConfig(segment_length=128, sensory_tokens=16, neural_cache_weight=0.1)
model = HMTWrapper.from_backbone(BACKBONE, config).eval()

path = f"{tempfile.mkdtemp()}/book.safetensors"
read_text(model, tokenizer, BOOK, path, name="book", progress=True)  # resumes if it was interrupted

state = load_state(path, model)
question = tokenizer("The", return_tensors="pt", add_special_tokens=False)
output = model.generate(**question, state=state, max_new_tokens=30, do_sample=False)
print(f"{state.position} tokens in {state.segment} segments were read")
print(tokenizer.decode(output[0]))
