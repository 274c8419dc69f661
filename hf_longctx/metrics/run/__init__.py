"""Run a local or served model: predictions, scores and responses, in trials that a journal records."""
