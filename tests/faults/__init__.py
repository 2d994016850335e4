"""The fault matrix: each row of docs/dev/faults.md is a fault that one test injects into a running gpumap.

Read `matrix.py` for the form of a row. The texts of a row are what its test asserts, and what the page shows.
"""
