"""The forgetting curve: how far back a model can copy from its context."""
