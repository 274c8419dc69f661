"""Retrieval questions that only the context can answer: a needle in a haystack, one line among many."""
