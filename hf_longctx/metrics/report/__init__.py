"""Combine results of metrics into an HTML page, model card metadata, or a comparison of models."""
