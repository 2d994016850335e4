"""`gpumap inspect`: the tables of `kubectl inspect gpushare` and `cgpu`, counted from what nodes' agents saw."""
