"""What is wrong on a node: broken GPUs, and what is wasted. Only here it is decided, once per snapshot. Pure.

In comes a node without findings, out go its findings and what could not be judged (`judge`), and sentences about the
latter (`unjudged`). Each finding is based only on known values. What cannot be judged is not judged: it is never 0
findings. Read `judge.py` first.
"""
