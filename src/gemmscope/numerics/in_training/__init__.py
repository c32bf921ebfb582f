"""What runs inside the user's training: it takes tensors, never changes the training, and never raises."""
