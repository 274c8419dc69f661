"""The classes of a custom backbone, or None. `HMTConfig.save_pretrained` rewrites this file."""

CONFIG_CLASS = MODEL_CLASS = None
