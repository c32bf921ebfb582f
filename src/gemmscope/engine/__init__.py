"""Drives measurements: worker processes, their messages, the journal, when to stop, statistics."""
