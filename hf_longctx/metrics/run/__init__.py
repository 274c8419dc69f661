"""Run the trials of a task with a local or served model, and record their scores in a journal."""
