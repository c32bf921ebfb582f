"""What a recipe loses in accuracy: reference quantizers, recorded tensors, errors of GEMMs, mixes of precisions."""
