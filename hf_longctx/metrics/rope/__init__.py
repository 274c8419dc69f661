"""Compute the RoPE base bound, and check models against it."""
