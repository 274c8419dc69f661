"""The forgetting curve: how far a model copies what it has read."""
