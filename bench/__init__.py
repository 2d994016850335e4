"""`make bench`: what gpumap costs, each figure a ratio of one run beside its goal. It asserts nothing."""
