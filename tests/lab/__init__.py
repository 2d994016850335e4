"""Tests of captures: what is recorded, under other names, and played again."""
