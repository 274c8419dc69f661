"""The class of a custom backbone, or None. `HMTConfig.save_pretrained` rewrites this file."""

MODEL_CLASS = None
