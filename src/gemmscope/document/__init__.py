"""`document(result)` builds the Document of any result. A new kind of result needs a line in `BUILDERS`.

A result is data, and may hold any text. A Document is for people: invisible characters are written out here, for every writer.
"""

from importlib import import_module

from gemmscope.document.model import Document, visible
from gemmscope.results.base import Result, damage_reported

BUILDERS = {
    "shapes": "gemmscope.document.shapes:shapes_document",
    "bench": "gemmscope.document.bench:bench_document",
    "step": "gemmscope.document.step:step_document",
    "sweep": "gemmscope.document.sweep:measured_sweep_document",
    "forecast": "gemmscope.document.forecast:forecast_document",
    "plan": "gemmscope.document.plan:plan_document",
    "numerics": "gemmscope.document.numerics:numerics_document",
    "explain": "gemmscope.document.explain:explain_document",
    "fleet": "gemmscope.document.fleet:fleet_document",
    "compare": "gemmscope.document.compare:compare_document",
}


def document(result: Result, name: str = "") -> Document:
    """Build the Document of a result. `name` is the name of the run file that it was read from."""
    module, _, function = BUILDERS[result.kind].partition(":")
    with damage_reported(result):
        shown: Document = visible(getattr(import_module(module), function)(result, name))
    return shown
