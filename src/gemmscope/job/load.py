"""From the name of a model to the model and how it is run: every command that takes a model starts here.

How it is run: what was typed first, then what its file says, and what follows from both. A file's number of GPUs and its global
batch stay, if the layout that is typed divides them; what belongs to another layout is dropped, with a finding.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.model import hf, presets
from gemmscope.model.families import ALIASES
from gemmscope.model.hf_keys import accepted
from gemmscope.model.limits import check_size
from gemmscope.model.readers import names_file, read_config
from gemmscope.model.spec import RUN_SETTINGS, ModelSource, RunSpec, framework_defaults, from_hyperparameters
from gemmscope.model.vary import varied
from gemmscope.workload.sharding import Given, dp_step, model_ranks, solve

NO_FILE = framework_defaults("no_file")
RANKS = {"gpus": "parallel", "global_batch": "sequence_length", "fsdp": "parallel"}
"""Arguments that determine fields of `RunSpec` without being fields themselves, with their limits."""

PARTS_OF_RECOMPUTE = ("recompute_modules", "recompute_share", "partly_recomputed")
BATCH = ("micro_batch_size", "sequence_length")
LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")  # in a config.json
MOST_SOURCES, LARGEST_SOURCE = 500, 8 << 20


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

    def as_measured(self) -> "ModelRun":
        """What a measured step runs of it: whole layers recomputed, or attention, or nothing."""
        if self.run.lora is not None:
            message = f"a measured step trains all weights, not {option('lora', self.run.lora)}"
            raise UserError(
                message, f"forecast it, or measure your own module with adapters: {option('module', 'FILE.py:FUNCTION')}"
            )
        if self.run.recompute_share == 1 and self.run.recompute_modules in ((), ("core_attn",)):
            return self
        plain = replace(self.run, recompute="none", recompute_modules=(), recompute_share=1.0)
        return replace(self, run=plain, findings=(*self.findings, finding("recompute-not-run")))


def identity(job: ModelRun | None) -> list[Any]:
    """What tells a model and its run from others, as plain data: by content, whatever its file is called."""
    if job is None:
        return []
    source = job.source
    model = replace(source.model, name="", source="") if source.model is not None else None
    return [repr(model), source.config, source.framework, source.module, sources_of(source), repr(job.run)]


def sources_of(source: ModelSource) -> list[str]:
    """The content of the user's module, and of the sources beside it that it may import, as digests."""
    path = Path((source.module or "").rpartition(":")[0])
    if source.module is None or not path.is_file():
        return []
    files = sorted({path, *islice(sorted(path.parent.glob("*.py")), MOST_SOURCES)})
    readable = [file for file in files if file.is_file() and file.stat().st_size <= LARGEST_SOURCE]
    return [f"{file.name} {sha256(file.read_bytes()).hexdigest()}" for file in readable]


def model_run(source: ModelSource, **given: Any) -> ModelRun:
    """How the model is run: the arguments given first (None: not given), then what the model's file says.

    They are fields of `RunSpec`, or what decides some of them: `gpus`, `global_batch` (sequences), `fsdp` (ranks that share
    weights, gradients and optimizer).
    """
    if strangers := [name for name in given if name not in (*RUN_SETTINGS, *RANKS)]:
        known = ", ".join((*RUN_SETTINGS, *RANKS))
        raise UserError(f"{', '.join(strangers)} is not a run setting", f"settings: {known}")
    typed = {name: value for name, value in given.items() if value is not None}
    typed |= {name: tuple(typed[name]) for name in ("pp_layers", "recompute_modules", "lora_linears") if name in typed}
    file = source.run_settings
    if "recompute" in typed:  # what the file says of it belongs to the file's kind
        file = {name: value for name, value in file.items() if name not in PARTS_OF_RECOMPUTE}
    findings = [
        finding("run-overridden", name=name, origin=source.origin, value=str(value), file_value=str(file[name]))
        for name, value in typed.items()
        if name in file and file[name] != value
    ]
    settings = {**file, **{name: value for name, value in typed.items() if name not in RANKS}}
    settings |= (assumed := assumed_batch(settings, source))
    if assumed:
        findings.append(assumption(assumed))
    of_file = {"tp": 1, "cp": 1, "pp": 1, **file}
    changed = {name for name in typed if of_file.get(name, typed[name]) != typed[name]}
    run = RunSpec(**{**dict.fromkeys(BATCH, 1), **settings})
    if "pp" in changed:
        run, about = _other_pipeline(run, typed, source)
        findings += about
    for name, limit in RANKS.items():
        if typed.get(name) is not None:
            check_size(option(name), typed[name], limit)
    run, about = _ranks(run, typed, source, changed)
    return _as_frameworks_run(ModelRun(source, _sharing(run, typed), (*findings, *about), frozenset(settings)))


def assumption(sizes: Mapping[str, int]) -> Finding:
    """The finding about sizes that nothing set."""
    return finding("batch-assumed", options=", ".join(option(name, value) for name, value in sizes.items()))


def usual_length(source: ModelSource) -> int:
    """The sequence length where nothing sets it: at most what the model's config allows."""
    longest = [value for key in LONGEST if isinstance(value := (source.config or {}).get(key), int) and value > 0]
    return int(min([NO_FILE["tokens"], *longest]))


def assumed_batch(settings: Mapping[str, Any], source: ModelSource) -> dict[str, int]:
    """The batch where nothing sets it: one sequence as long as the model allows, or as many as have so many tokens. A module may
    bring its own inputs; the batch of a model that reads no tokens must be given."""
    if source.module is not None or {*BATCH} <= settings.keys():
        return {}
    if source.model is None and not _reads_tokens(source):
        if BATCH[0] in settings:
            return {}
        message = f"{option(BATCH[0])} is not given, and {source.origin} does not set it"
        raise UserError(message, f"add {option(BATCH[0], 'N')}")
    length = settings.get(BATCH[1]) or usual_length(source)
    batch = settings.get(BATCH[0]) or max(NO_FILE["tokens"] // length, 1)
    return {name: value for name, value in zip(BATCH, (batch, length), strict=True) if name not in settings}


def _reads_tokens(source: ModelSource) -> bool:
    """Whether a config without closed form is certainly that of a language model. Other models may have no sequence length."""
    config = source.config or {}
    senses = any(key in config for key in ("image_size", "num_mel_bins", "num_channels", "patch_size", "conv_stride"))
    return not senses and any(key in config for key in ("vocab_size", "text_config"))


def _other_pipeline(run: RunSpec, typed: Mapping[str, Any], source: ModelSource) -> tuple[RunSpec, list[Finding]]:
    """The run with other stages than its file has: without the split, and with its virtual stages if they still divide."""
    if "pp_layers" not in typed:
        run = replace(run, pp_layers=None)
    if "vp" in typed or run.vp == 1:
        return run, []
    layers = len(source.model.layers) if source.model is not None else 0
    if run.pp > 1 and layers % (run.pp * run.vp) == 0:
        return run, []
    return replace(run, vp=1), [finding("virtual-stages-reset", pieces=run.vp, origin=source.origin)]


def _ranks(run: RunSpec, typed: Mapping[str, Any], source: ModelSource, changed: set[str]) -> tuple[RunSpec, list[Finding]]:
    """dp and accumulation: from what was typed, else from the file's GPUs and global batch, where they still divide."""
    file_dp, findings = _dp_of_file(run, typed, source)
    sizes = ("gpus", "global_batch", "gradient_accumulation", "fsdp")
    asked = Given(dp=typed.get("dp", file_dp), **{name: typed.get(name) for name in sizes})
    ranks = solve(run, asked)
    accumulation = ranks.gradient_accumulation
    run = replace(run, dp=ranks.dp, gradient_accumulation=accumulation or run.gradient_accumulation)
    if accumulation is None and source.global_batch is not None and run.dp is not None:
        try:
            decided = asked if asked.gpus is not None else replace(asked, dp=run.dp)
            accumulation = solve(run, replace(decided, global_batch=source.global_batch)).gradient_accumulation
        except UserError as error:
            if {"dp", "gpus"} & typed.keys():
                message = f"{error.message} (the global batch is from {source.origin})"
                raise UserError(message, f"{error.hint}; or set {option('gradient_accumulation')}") from error
    if accumulation is not None:
        return replace(run, gradient_accumulation=accumulation), findings
    run, about = _assumed_accumulation(run, source, changed)
    return run, findings + about


def _dp_of_file(run: RunSpec, typed: Mapping[str, Any], source: ModelSource) -> tuple[int | None, list[Finding]]:
    """The file's GPUs divided by those of one replica, unless dp was given or follows from other arguments; a finding if they do
    not divide."""
    said = source.run_settings.get("dp")
    if said is None or {"dp", "gpus"} & typed.keys() or {"global_batch", "gradient_accumulation"} <= typed.keys():
        return None, []
    of_file = {name: source.run_settings.get(name, 1) for name in ("tp", "cp", "pp")}
    gpus = model_ranks(replace(run, **of_file)) * said
    dp, rest = divmod(gpus, model_ranks(run))
    if dp and not rest and dp % dp_step(run) == 0:
        return dp, []
    return None, [finding("data-parallel-reset", origin=source.origin, gpus=gpus)]


def _assumed_accumulation(run: RunSpec, source: ModelSource, changed: set[str]) -> tuple[RunSpec, list[Finding]]:
    """Micro-batches per step where the number of GPUs is not known: those of the file's global batch on the fewest GPUs, else the
    file's own number if it belongs to this layout, else the fewest."""
    batch, of_file = source.global_batch, source.run_settings.get("gradient_accumulation")
    virtual = run.vp > 1 and run.pp > 1 and "vp" in source.run_settings
    assumed = run.pp if virtual else 1
    count, rest = divmod(batch or 0, run.micro_batch_size * run.data_parallel)
    if count and not rest and count % assumed == 0:
        facts = {"origin": source.origin, "batch": batch, "gpus": run.gpus, "micro_batches": count}
        return replace(run, gradient_accumulation=count), [finding("fewest-gpus-assumed", **facts)]
    if of_file is not None and changed & {"micro_batch_size", "tp", "cp", "pp"}:
        about = [finding("accumulation-reset", assumed=assumed)] if of_file != assumed else []
        return replace(run, gradient_accumulation=assumed), about
    assumed = assumed if of_file is None else of_file
    run = replace(run, gradient_accumulation=assumed)
    if batch is not None:
        return run, [finding("accumulation-unknown", origin=source.origin, batch=batch, assumed=assumed)]
    return run, [finding("accumulation-assumed", origin=source.origin, assumed=assumed)] if virtual and of_file is None else []


def _sharing(run: RunSpec, typed: Mapping[str, Any]) -> RunSpec:
    """What data-parallel ranks share, and how many ranks share it; a `UserError` for contradictory settings."""
    holders = run.data_parallel * run.cp
    if typed.get("tp_overlap") and run.tp > 1 and not run.sequence_parallel:
        problem = f"{option('tp_overlap')} overlaps the collectives of sequence parallelism, which is off"
        raise UserError(problem, f"add {option('sequence_parallel')}")
    if "fsdp" in typed:
        if typed.get("zero", 3) != 3:
            raise UserError(
                f"{option('fsdp', typed['fsdp'])} shards weights, gradients and optimizer states, but {option('zero', run.zero)} "
                "shards less",
                f"remove {option('zero')} or {option('fsdp')}",
            )
        return replace(run, zero=3, zero_ranks=typed["fsdp"] if typed["fsdp"] != holders else None)
    if typed.get("zero") and holders == 1 and not {"dp", "gpus"} & typed.keys():
        raise UserError(
            f"{option('zero', run.zero)} shards across data-parallel ranks, but there is only one",
            f"add {option('gpus', model_ranks(run) * 8)} or {option('dp', 8)}, or remove {option('zero')}",
        )
    if run.zero_ranks is not None and "zero_ranks" not in typed and (run.zero == 0 or holders % run.zero_ranks):
        return replace(run, zero_ranks=None)  # the file's groups, in another layout
    return run


REQUIRED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
SIZES = (*REQUIRED_SIZES, "num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_experts_per_tok")
COMPLETING = {"vocab_size": "vocab_size", "num_hidden_layers": "layers"}
"""Sizes that can be given beside a preset or a config, with their limits: they stand in place of those of the file."""


def load_model(
    *,
    preset: str | None = None,
    config: str | None = None,
    module: str | None = None,
    gated_mlp: bool = False,
    mtp_layers: int | None = None,
    ignore_key: Collection[str] = (),
    **sizes: int | None,
) -> ModelSource:
    """The model that was named, in one of four ways: a preset, a config file, a module of the user's, plain sizes.

    `mtp_layers`: with so many layers of multi-token prediction, whatever its file says. `ignore_key`: keys of a config.json that
    nothing reads and that change no size.
    """
    if unknown := [name for name in sizes if name not in SIZES]:
        raise UserError(f"{', '.join(unknown)} is not a size of a model", f"sizes: {', '.join(SIZES)}")
    given = {name: value for name, value in sizes.items() if value is not None}
    own = {name: given.pop(name) for name in COMPLETING if name in given} if (config or preset) is not None else {}
    ways = [option(name) for name, value in (("config", config), ("preset", preset), ("module", module)) if value is not None]
    if given or gated_mlp:
        ways.append(", ".join(option(name) for name in given) or option("gated_mlp"))
    if not ways:
        raise UserError(
            "no model is named",
            f"give a name that gemmscope models lists, {option('config', 'PATH')}, {option('module', 'FILE.py:FUNCTION')}, "
            "or the sizes: " + " ".join(option(name, "N") for name in REQUIRED_SIZES),
        )
    if len(ways) > 1:
        raise UserError(f"the model is named in {len(ways)} ways at once: {' and '.join(ways)}", "keep one of them")
    if module is not None:
        source = ModelSource(origin=module, model=None, module=module)
    elif preset is not None:
        source = presets.load(preset)
    else:
        source = _from_config(config) if config is not None else _from_sizes(given, gated=gated_mlp)
    source = _completed(accepted(source, ignore_key), own)
    return source if mtp_layers is None else with_prediction_layers(source, mtp_layers)


def _completed(source: ModelSource, sizes: Mapping[str, int]) -> ModelSource:
    """The model with other sizes than its file has: read from its config with these, where that has no lists of layers."""
    if not sizes:
        return source
    if source.model is None:
        named = " and ".join(option(name, value) for name, value in sizes.items())
        raise UserError(f"{named} cannot change {source.origin}, which is known only from a trace", "change the config")
    old = {"vocab_size": source.model.vocab_size, "num_hidden_layers": len(source.model.layers)}
    changed = {name: check_size(option(name), value, COMPLETING[name]) for name, value in sizes.items() if value != old[name]}
    findings = [entry for entry in source.findings if entry.code != "vocabulary-missing" or "vocab_size" not in sizes]
    about = {"origin": source.origin}
    findings += [
        finding("run-overridden", name=name, value=str(value), file_value=str(old[name] or "nothing"), **about)
        for name, value in changed.items()
    ]
    model, count = source.model, changed.get("num_hidden_layers")
    source = replace(source, findings=tuple(findings))
    if source.config is not None and changed:
        names = {name: next((key for key in ALIASES[name] if key in (source.config or ())), name) for name in changed}
        config = {**source.config, **{names[name]: value for name, value in changed.items()}}
        with suppress(UserError):  # lists with one entry for each layer
            own = hf.from_config(config, source.origin).model
            if own is not None and count in (None, len(own.layers)):
                return replace(source, model=replace(own, name=model.name, source=model.source), config=config)
    model = replace(model, vocab_size=changed.get("vocab_size", model.vocab_size))
    if count is not None:
        kinds, model = model.pattern(), varied(model, {"layers": count})
        mixed = [finding("layers-in-proportion", layers=kinds, **about)] if len(dict(model.layer_groups())) > 1 else []
        source = replace(source, findings=(*source.findings, *mixed))
    return replace(source, model=model, config=source.config if not changed else None)


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


def _as_frameworks_run(job: ModelRun) -> ModelRun:
    """The job with sequence parallelism beside tensor parallelism, if nothing says otherwise and the sequence can be split."""
    run, known = job.run, "sequence_parallel" in job.settled or not NO_FILE["sequence_parallel"]
    if known or run.tp == 1 or (run.sequence_length // run.cp) % run.tp:
        return job
    findings = (*job.findings, finding("sequence-parallel-assumed"))
    return replace(job, run=replace(run, sequence_parallel=True), findings=findings)
