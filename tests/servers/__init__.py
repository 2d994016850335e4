"""Tests that compare `bill` with all samples of a real Prometheus: minutes of computing."""
