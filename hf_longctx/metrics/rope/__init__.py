"""Compute the RoPE base bound, and check whether models satisfy it."""
