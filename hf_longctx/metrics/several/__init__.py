"""Several facts in a long text, and one question for all of them: multi-needle, variable tracking."""
