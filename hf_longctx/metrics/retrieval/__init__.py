"""Prompts, wording and scoring of retrieval tasks: needle in a haystack and line retrieval."""
