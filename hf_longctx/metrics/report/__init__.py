"""Combine several results into an HTML page, a model card or a comparison."""
