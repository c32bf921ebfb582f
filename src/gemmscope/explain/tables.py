"""All tables of one diagnosis."""

from collections.abc import Mapping

from gemmscope.explain.attention import attention_totals
from gemmscope.explain.collectives import collective_totals, collectives_of
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.gemm_table import gemm_shapes
from gemmscope.explain.launches import allocator_calls, idle_frames, launch_statistics, memory_points, top_kernels
from gemmscope.results.explain import ExplainTables


def explain_tables(diagnosis: TraceDiagnosis, waits_us: Mapping[int, float]) -> ExplainTables:
    """`waits_us`: how long this rank waits in each collective, by the identity of its work, if other ranks show it."""
    step, view = diagnosis.evidence, diagnosis.view
    return ExplainTables(
        gemm_shapes=gemm_shapes(step),
        attention=attention_totals(step),
        collectives=collective_totals(collectives_of(view), view.count, view.trace.world_size, waits_us),
        kernels=top_kernels(step),
        launches=launch_statistics(step),
        idle_frames=idle_frames(step),
        allocator=allocator_calls(view),
        memory=memory_points(view),
    )
