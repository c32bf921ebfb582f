"""One file per framework. Each runs all recipes through the same code; only the recipe object varies."""

from gemmscope.recipe.frameworks import measuring_classes

# Backend -> its module and class. The modules import frameworks, so only the worker loads them.
BACKENDS = measuring_classes("bench")
