"""The fault matrix: each row of `make faults` is a fault that one test injects into a running gpumap.

Read `matrix.py` for the form of a row. The texts of a row are what its test asserts, and what `make faults` prints.
"""
