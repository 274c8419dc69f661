"""Several results together: a page, a model card, a comparison."""
