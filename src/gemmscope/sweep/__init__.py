"""Sweeps: one or two sizes varied, forecast or measured."""
