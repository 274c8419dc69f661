"""Generation from a long prompt needs no more memory than from a short one."""

from pathlib import Path

import pytest
import torch
from commands import run
from transformers import LlamaConfig, LlamaForCausalLM


GENERATE = """
import ctypes, re, sys, torch
from pathlib import Path
from hf_longctx import HMTConfig, HMTWrapper
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: glibc returns freed memory immediately
model = HMTWrapper.from_backbone(sys.argv[1], HMTConfig(segment_length=256, sensory_tokens=16, memory_size=32))
for tokens in (5_000, 20_000):
    new = model.generate(torch.arange(tokens)[None] % 100, max_new_tokens=300, do_sample=False, eos_token_id=None)
    assert new.shape == (1, tokens + 300)
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
def test_generating_from_a_long_prompt(tmp_path):
    """Load from a path, and generate more than a segment. Attending to 20k tokens in one pass would take gigabytes."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=100, hidden_size=256, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).save_pretrained(tmp_path)
    done = run(["python", "-c", GENERATE, tmp_path])
    assert done.returncode == 0, done.stderr
    short, long = map(int, done.stdout.split())  # kB
    hidden_states = 15_000 * 256 * 4 / 1024
    assert long - short < hidden_states  # a tenth of that was seen
