"""Running a model, here or served: predictions, scores, replies, in parts that a journal keeps."""
