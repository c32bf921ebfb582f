"""What training gains: the real step, run in short, and what it says of the whole run."""
