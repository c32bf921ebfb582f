"""One file per framework: how it builds the parts of a layer, in any recipe.

The files import frameworks, so only the worker loads them.
"""
