"""What the model is: `spec.py` describes it; one reader per format fills the description."""
