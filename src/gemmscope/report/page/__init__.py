"""The report: one page about one or several runs, as HTML, Markdown and figures.

A run file becomes a `RunPart` (`parts.py`), by the one small module that knows its kind (`from_bench.py`, `from_step.py`, …);
what draws the page (`html.py`, `markdown.py`, `figures.py`) knows parts only. A new kind of run file is a module, and a line in
`kinds.py`.
"""
