"""The loss of each token, given those before it."""
