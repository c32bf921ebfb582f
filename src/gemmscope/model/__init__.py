"""The model and how it is run: `spec.py` describes both; one reader per file format builds the description."""
