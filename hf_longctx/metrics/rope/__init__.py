"""The RoPE base bound, and a check of models against it."""
