"""The commands that look at a node or a running agent: `map`, `top`, `waste`, `doctor`. They judge documents alone."""
