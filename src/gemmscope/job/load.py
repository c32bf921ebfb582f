"""From the name of a model to the model and how it is run: every command that takes a model starts here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.job.layout import choose_run
from gemmscope.model import presets
from gemmscope.model.readers import names_file, read_config
from gemmscope.model.spec import ModelSource, RunSpec, from_hyperparameters

REQUIRED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
SIZES = (*REQUIRED_SIZES, "num_key_value_heads", "head_dim", "vocab_size")


@dataclass(frozen=True)
class ModelRun:
    """A model and how it is run. `findings` are about both: what was assumed, overridden or ignored."""

    source: ModelSource
    run: RunSpec
    findings: tuple[Finding, ...] = ()
    settled: frozenset[str] = frozenset()  # settings that were typed, or that the file has

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch size; None where it is not given, because a module may bring its own inputs."""
        return self.run.micro_batch_size if "micro_batch_size" in self.settled else None

    @property
    def sequence(self) -> int | None:
        """The sequence length; None where it is not given."""
        return self.run.sequence_length if "sequence_length" in self.settled else None


def load_model(
    *,
    preset: str | None = None,
    config: str | None = None,
    module: str | None = None,
    gated_mlp: bool = False,
    mtp_layers: int | None = None,
    **sizes: int | None,
) -> ModelSource:
    """The model that was named, in one of four ways: a preset, a config file, a module of the user's, plain sizes.

    `mtp_layers`: with so many layers of multi-token prediction, whatever its file says.
    """
    source = _named_model(preset=preset, config=config, module=module, gated_mlp=gated_mlp, **sizes)
    return source if mtp_layers is None else with_prediction_layers(source, mtp_layers)


def with_prediction_layers(source: ModelSource, count: int) -> ModelSource:
    """The model with so many layers of multi-token prediction."""
    if source.model is None:
        raise UserError(
            f"{option('mtp_layers', count)} applies only to models with a closed form, but {source.origin} is traced",
            f"remove {option('mtp_layers')}",
        )
    if type(count) is not int or count < 0:
        message = f"{option('mtp_layers')} must be a whole number, not {shown(count)}"
        raise UserError(message, f"for example {option('mtp_layers', 1)}")
    findings = tuple(entry for entry in source.findings if entry.code != "prediction-layers-not-included")
    return replace(source, model=replace(source.model, prediction_layers=count), findings=findings)


def _named_model(
    *, preset: str | None, config: str | None, module: str | None, gated_mlp: bool, **sizes: int | None
) -> ModelSource:
    if unknown := [name for name in sizes if name not in SIZES]:
        raise UserError(f"{', '.join(unknown)} is not a size of a model", f"sizes: {', '.join(SIZES)}")
    given = {name: value for name, value in sizes.items() if value is not None}
    ways = [option(name) for name, value in (("config", config), ("preset", preset), ("module", module)) if value is not None]
    if given or gated_mlp:
        ways.append(", ".join(option(name) for name in given) or option("gated_mlp"))
    if not ways:
        raise UserError(
            "no model is named",
            f"give {option('preset', 'NAME')}, {option('config', 'PATH')}, {option('module', 'FILE.py:FUNCTION')}, or the sizes: "
            + " ".join(option(name, "N") for name in REQUIRED_SIZES),
        )
    if len(ways) > 1:
        raise UserError(f"the model is named in {len(ways)} ways at once: {' and '.join(ways)}", "keep one of them")
    if module is not None:
        return ModelSource(origin=module, model=None, module=module)
    if preset is not None:
        return presets.load(preset)
    return _from_config(config) if config is not None else _from_sizes(given, gated=gated_mlp)


def _from_sizes(sizes: Mapping[str, int], *, gated: bool) -> ModelSource:
    missing = [name for name in REQUIRED_SIZES if name not in sizes]
    if missing:
        listed = ", ".join(map(option, missing))
        raise UserError(f"the sizes are incomplete: {listed} missing", f"add {' '.join(option(name, 'N') for name in missing)}")
    values: dict[str, Any] = {name: sizes.get(name) for name in SIZES}
    return ModelSource(origin="command line", model=from_hyperparameters(**values, gated=gated))


def _from_config(config: str) -> ModelSource:
    """What `config` names; if that is nothing, perhaps a preset was meant."""
    try:
        return read_config(config)
    except UserError as error:
        similar = closest(config, presets.names(), 1) if len(config) < 100 and not names_file(config) else []
        if not similar:
            raise
        raise UserError(error.message, f"did you mean {option('preset', similar[0])}? {error.hint}") from error


def model_run(source: ModelSource, **given: Any) -> ModelRun:
    """How the model is run: the arguments given first, then what the model's file says.

    They are fields of `RunSpec`, or what decides some of them: `gpus`, `global_batch` (sequences), `fsdp` (ranks that share
    weights, gradients and optimizer).
    """
    choice = choose_run(source, given)
    return ModelRun(source, choice.run, choice.findings, choice.settled)


def as_frameworks_run(job: ModelRun) -> ModelRun:
    """The job with sequence parallelism beside tensor parallelism, if nothing says otherwise and the sequence can be split."""
    run = job.run
    if run.tp == 1 or "sequence_parallel" in job.settled or (run.sequence_length // run.cp) % run.tp:
        return job
    findings = (*job.findings, finding("sequence-parallel-assumed"))
    return replace(job, run=replace(run, sequence_parallel=True), findings=findings)
