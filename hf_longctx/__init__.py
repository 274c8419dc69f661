"""Long-context research in the Hugging Face ecosystem."""

__version__ = "0.1.0"
