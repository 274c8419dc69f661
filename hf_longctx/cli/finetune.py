"""Fine-tune a pretrained model, with LoRA or in full; the same command resumes a run that was stopped.

Recipes:
  lora            continue the training of any causal language model on other text
  fox-from-llama  turn a Llama, Mistral, Qwen2 or Qwen3 into a Forgetting Transformer and train its gates
  rope-extend     a longer context by a larger RoPE base, chosen by the bound of Men et al. 2024
  hmt             put a memory around a model; called again on what the first stage has trained, make it recall

Examples:
  hf-longctx finetune --model MODEL --data text.jsonl --max_length 2048 --output_dir run
  hf-longctx finetune --recipe rope-extend --model MODEL --max_length 32768 --data books --output_dir run
  hf-longctx finetune --config run/config.yaml --output_dir run
"""

from .train import run_training


def run(words: list[str]) -> None:
    run_training(words, "FinetuneConfig", __doc__)
