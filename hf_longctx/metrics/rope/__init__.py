"""The RoPE base bound, and what it says about a model."""
