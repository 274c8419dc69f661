"""Running a model, local or served: predictions, scores and responses, in trials that a journal keeps."""
