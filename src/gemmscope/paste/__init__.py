"""Recipes, mixes of precisions and layouts as settings that training frameworks take: ready to paste."""
