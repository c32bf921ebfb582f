"""The mixes of a forecast: those that a GPU runs, and their memory."""

from collections.abc import Sequence

from gemmscope.app.forecast_gpus import forecastable
from gemmscope.app.mixing import Mixes, MixRequest, priced_mixes, quantized_ops
from gemmscope.app.model import RankWorkload
from gemmscope.findings import finding
from gemmscope.forecast.memory import RankMemory, blended, rank_memory
from gemmscope.forecast.memory_results import memory_result
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.traced import traced_memory
from gemmscope.gpu.specs import GpuSpec
from gemmscope.recipe.recipes import recipe
from gemmscope.results.forecast import RecipeMemory


def mixes_on(chip: GpuSpec, asked: MixRequest | None, names: Sequence[str], subject: RankWorkload) -> Mixes:
    """The mixes to forecast for one GPU; what it does not run is left out, with the reason."""
    if asked is None:
        return Mixes()
    needed = [recipe(name).name for name in (asked.recipe, asked.higher) if name is not None]
    missing = [name for name in needed if name not in forecastable(chip.name, needed)]
    if missing:
        return Mixes((), (finding("mix-left-out", recipe=missing[0], gpu=chip.name),))
    model = subject.source.model
    return priced_mixes(asked, names, quantized_ops(model, subject.run, subject.workload), model)


def memory_of_recipe(subject: RankWorkload, name: str, chip: GpuSpec, forecast: StepForecast) -> RecipeMemory:
    """The memory that a recipe needs; for a mix, between that of its recipes, by the share of the linears that it keeps."""
    chosen = recipe(name)
    if chosen.kept is None:
        return memory_result(_rank_memory(subject, name, chip), name, chip)
    low, high = (_rank_memory(subject, recipe_name, chip) for recipe_name in (chosen.base, chosen.kept.recipe))
    return memory_result(blended(low, high, forecast.kept_share(name)), name, chip)


def _rank_memory(subject: RankWorkload, name: str, chip: GpuSpec) -> RankMemory:
    if subject.source.model is not None:
        return rank_memory(subject.source.model, subject.run, name, chip)
    assert subject.trace is not None
    return traced_memory(subject.trace, subject.run, name, chip)
