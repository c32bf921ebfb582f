"""What one rank runs: `derive.py` lists the operations in closed form, `trace.py` records them from a live module."""
