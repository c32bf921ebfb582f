"""What the GEMMs of a trace would take in a better recipe, from the GEMMs that the forecast was fitted on.

`explain/` itself does not import the forecast: it only reads a trace, without numpy.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from gemmscope.errors import MissingFactError, UserError
from gemmscope.forecast.gemm import LAYOUT_OF, Layout, Times, model
from gemmscope.forecast.physics import Shapes
from gemmscope.gpu.specs import GpuSpec, spec_of
from gemmscope.recipe.precisions import precision_in_traces, precisions, timed_precisions
from gemmscope.results.explain import GemmShapeTotal

MULTIPLE = 16  # sizes in low precision must be multiples of this
WORTH = 0.95  # a better recipe is named only if it takes at most this share of the current time


def with_better_recipe(rows: Sequence[GemmShapeTotal], gpu_name: str) -> tuple[GemmShapeTotal, ...]:
    """The rows, with the recipe in which each GEMM would be fastest; unchanged if the GPU cannot be forecast."""
    spec = spec_of(gpu_name)
    chosen = [place for place, row in enumerate(rows) if _can_change(row)]
    if spec is None or not chosen:
        return tuple(rows)
    shapes = Shapes.of(*([getattr(rows[place], side) for place in chosen] for side in ("m", "k", "n")))
    layouts: list[Layout] = [
        next((layout for name, layout in LAYOUT_OF.items() if rows[place].passes == (name,)), "tn") for place in chosen
    ]
    times = {fmt: time for fmt in timed_precisions() if (time := _times(spec, fmt, shapes, layouts)) is not None}
    result = list(rows)
    for number, place in enumerate(chosen):
        own = {fmt: (float(time.gemm_ms[number]), float(time.quantize_ms[number])) for fmt, time in times.items()}
        result[place] = _better(rows[place], own)
    return tuple(result)


def _can_change(row: GemmShapeTotal) -> bool:
    """Whether it could run in another recipe: of one matrix, in a known precision, with sizes that low precision takes.

    The number of rows is free, except where wgrad makes it the inner size or the length of a row.
    """
    sides = (row.m, row.k, row.n) if "wgrad" in row.passes else (row.k, row.n)
    known = precision_in_traces().get(row.precision)
    changes = known is not None and (bool(known.timed_as) or not known.low)
    return row.batch == 1 and changes and not any(side % MULTIPLE for side in sides)


def _times(spec: GpuSpec, fmt: str, shapes: Shapes, layouts: Sequence[Layout]) -> Times | None:
    try:
        return model().time(spec, fmt, shapes, layout=np.array(layouts))
    except MissingFactError:
        raise
    except UserError:  # the GPU does not support it, or nothing like it was measured
        return None


def _better(row: GemmShapeTotal, times: dict[str, tuple[float, float]]) -> GemmShapeTotal:
    """The row with the fastest of the lower precisions. `times`: milliseconds of the GEMM and of quantization, by format."""
    own_ms, own_cast_ms = times.get(precision_in_traces()[row.precision].timed_as, (inf, 0.0))
    now_ms = row.time_ms / row.count
    # What slows this GEMM down now (a low clock, other work at the same time) would slow it down in another recipe as well.
    slower = max(now_ms / own_ms, 1.0)
    rising = list(precision_in_traces())
    lower = {precision_in_traces()[name].timed_as for name in rising[: rising.index(row.precision)]}
    better_ms = {fmt: slower * gemm + max(cast - own_cast_ms, 0.0) for fmt, (gemm, cast) in times.items() if fmt in lower}
    best = min(better_ms, key=lambda fmt: better_ms[fmt], default=None)
    if best is None or better_ms[best] > WORTH * now_ms:
        return row
    return row.model_copy(update={"better": precisions()[best].title, "better_ms": better_ms[best] * row.count})
