"""The training step: runs the real step for a short time, and predicts the whole run from it."""
