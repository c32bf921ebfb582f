"""Estimate times on GPUs that are not at hand, from sizes and coefficients fitted to measurements."""
