"""Trigger the lazy initialization of libraries once, for all forks of the server of commands.py."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping


get_checkpoint_conversion_mapping("llama")  # the table of all models: patterns that take 0.1 s to compile
