"""Mutation testing of the pure rooms: a test must notice each small change of their code (docs/dev/mutation.md).

`mutants` makes the changes, `trial` runs the tests over one of them, `__main__` is the command.
"""
