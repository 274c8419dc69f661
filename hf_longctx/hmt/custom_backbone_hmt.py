"""Classes of a backbone that transformers lacks, or None: `HMTConfig.save_pretrained` writes this file anew."""

CONFIG_CLASS = MODEL_CLASS = None
