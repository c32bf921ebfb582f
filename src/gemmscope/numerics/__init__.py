"""What a recipe loses in accuracy. `in_training/` records tensors, `evaluation/` computes errors; the modules here serve both."""
