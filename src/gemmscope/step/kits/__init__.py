"""One file per framework: how it builds the parts of a layer, in any recipe."""

from gemmscope.recipe.frameworks import measuring_classes

# Backend -> its module and class. The modules import frameworks, so only the worker loads them.
KITS = measuring_classes("step")
