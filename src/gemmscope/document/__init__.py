"""Turns a result into a Document: the answer, findings, tables, charts and facts that every writer shows."""
