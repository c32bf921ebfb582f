"""The command line: one file per command, options that several commands share in `options.py`."""
