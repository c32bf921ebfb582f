"""What evaluates recorded tensors, in a worker process and in its parent: errors, mixes of precisions, emulation."""
