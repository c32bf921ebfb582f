"""What a recorded training step really did, and why it gained what it gained."""
