"""`gpumap doctor`: a node's map and facts about the process become checks, each with a verdict and a remedy."""
