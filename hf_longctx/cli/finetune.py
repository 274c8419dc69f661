"""Fine-tune a pretrained model, with LoRA or in full; the same command resumes a stopped run.

Examples:
  hf-longctx finetune --model MODEL --data text.jsonl --max_length 2048 --output_dir run
  hf-longctx finetune --recipe windows --model MODEL --keep 0.25 --output_dir run
  hf-longctx finetune --recipe rope-extend --model MODEL --max_length 32768 --data books --output_dir run
  hf-longctx finetune --config run/config.yaml --output_dir run
"""
