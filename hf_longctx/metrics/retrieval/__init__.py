"""Questions that only the context answers: a needle in a haystack, one line among many."""
