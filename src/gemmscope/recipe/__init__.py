"""Recipes: the operand formats of each pass, what is quantized, what that costs in bytes, and which GPUs run it."""
