"""Memory as part of a result: the table of every recipe, what does not fit, and what to change."""

from collections.abc import Iterator, Sequence

from gemmscope.findings import Fact, Finding, finding
from gemmscope.forecast.memory import rank_memory, recipe_memory
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.traced import traced_memory
from gemmscope.gpu.specs import GB, GpuSpec
from gemmscope.job.rank_workload import RankWorkload
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.results.forecast import RecipeMemory

NAMES = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "master_weights_bytes": "master weights",
    "moments_bytes": "moments",
    "activations_bytes": "activations",
    "quantized_copies_bytes": "quantized copies of the weights",
    "communication_bytes": "communication buffers",
    "workspace_bytes": "logits and loss",
}
FINDINGS = {"does not fit": "does-not-fit", "may not fit": "may-not-fit", "tight": "memory-tight"}


def memory_findings(memory: Sequence[RecipeMemory], run: RunSpec) -> Iterator[Finding]:
    """Findings about recipes that do not fit, may not fit or are tight in memory, with what to change."""
    for fit, code in FINDINGS.items():
        if needs := [need for need in memory if need.fit == fit]:
            rows = {text: getattr(needs[0], field) for field, text in NAMES.items()}
            facts: dict[str, Fact] = {"needed_gb": _range_gb(needs), "largest": sorted(rows, key=lambda name: -rows[name])[:2]}
            yield finding(code, memory_gb=needs[0].available_bytes / GB, **facts, remedies=_remedies(needs[0], run))


def _range_gb(memory: Sequence[RecipeMemory]) -> list[str]:
    """What each recipe usually needs, at least and at most, in GB."""
    rows = ((need.recipe, need.total_bytes, need.least_bytes, need.most_bytes) for need in memory)
    return [f"{name} {usual / GB:.0f} [{least / GB:.0f}, {most / GB:.0f}]" for name, usual, least, most in rows]


def _remedies(memory: RecipeMemory, run: RunSpec) -> list[str]:
    """Settings that would lower what this layout needs most, the strongest first."""
    states = memory.weights_bytes + memory.gradients_bytes + memory.master_weights_bytes + memory.moments_bytes
    kept = memory.activations_bytes + memory.workspace_bytes
    unknown = bool(run.zero) and run.dp is None
    if unknown:
        sharing = ["‹gpus› or ‹dp›, to shard the optimizer across more ranks"]
    else:
        sharing = [] if run.zero_stage == 3 else ["‹zero› 3 with more ‹dp›" if run.zero_stage else "‹dp› and ‹zero› 1 to 3"]
    splitting = ["‹tp› or ‹pp›" if run.pp == 1 else "‹tp›"]
    smaller = [] if run.recompute == "full" else ["‹recompute› full"]
    smaller += ["a smaller ‹micro_batch_size›"] if run.micro_batch_size > 1 else ["‹cp›"]
    return [*sharing, *splitting, *smaller] if states > kept or unknown else [*smaller, *splitting, *sharing]


def memory_of_recipe(subject: RankWorkload, name: str, chip: GpuSpec, forecast: StepForecast) -> RecipeMemory:
    """The memory that a recipe needs; for a mix, between that of its recipes, by the share of the linears that it keeps."""
    chosen = recipe(name)
    if chosen.kept is not None:
        low, high = (memory_of_recipe(subject, one, chip, forecast) for one in (chosen.base, chosen.kept.recipe))
        share, rows = forecast.kept_share(name), (*NAMES, "reserve_bytes", "least_bytes", "most_bytes")
        between = {row: getattr(low, row) * (1 - share) + getattr(high, row) * share for row in rows}
        nearest = high if share == 1 else low
        return recipe_memory(name, chip, stage=nearest.stage, in_flight=nearest.in_flight, **between)
    if subject.source.model is not None:
        return rank_memory(subject.source.model, subject.run, name, chip)
    assert subject.trace is not None
    return traced_memory(subject.trace, subject.run, name, chip)
