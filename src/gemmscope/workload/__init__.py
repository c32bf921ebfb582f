"""The operations of one rank: `derive.py` lists them in closed form, `trace.py` records them from a live module."""
