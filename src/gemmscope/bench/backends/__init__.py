"""One file per framework. Each runs all recipes through the same code; only the recipe object varies.

The files import frameworks, so only workers load them.
"""
