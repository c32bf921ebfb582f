"""Compares results: runs of the same thing with each other, and a recorded step with its prediction."""
