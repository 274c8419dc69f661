"""Fine-tune a pretrained model, with LoRA or in full; the same command resumes a stopped run.

Recipes:
  lora            continue the training of any causal language model on new data
  fox-from-llama  convert a Llama, Mistral, Qwen2 or Qwen3 to a Forgetting Transformer and train its gates
  rope-extend     extend the context with a larger RoPE base, chosen by the bound of Men et al. 2024
  hmt             add a memory to a model; to train the memory's recall, run the recipe again on the resulting model

Examples:
  hf-longctx finetune --model MODEL --data text.jsonl --max_length 2048 --output_dir run
  hf-longctx finetune --recipe rope-extend --model MODEL --max_length 32768 --data books --output_dir run
  hf-longctx finetune --config run/config.yaml --output_dir run
"""
