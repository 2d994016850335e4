"""How many examples a law is tried on: a quarter with `make test`, all with `make test-all`."""

from __future__ import annotations

from hypothesis import settings

FULL = 100
"""The profile `full` tries a law without a number of its own on so many."""


def examples(number: int) -> int:
    """As many of `number` as the profile in use allows. Call it where the test is declared."""
    return max(5, number * settings().max_examples // FULL)
