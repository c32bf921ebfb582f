"""Reads every job of torchtitan's Python registries, and prints what became of it.

    python benchmarks/framework_torchtitan.py FOLDER  # a copy of github.com/pytorch/torchtitan
    python benchmarks/framework_torchtitan.py FOLDER --write  # also writes model/torchtitan_jobs.toml

A job is wrong whose size differs from the one below, which was read by hand from torchtitan's code, or for which the table that
ships with gemmscope gives another model or other settings than the files.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gemmscope.errors import UserError
from gemmscope.model import torchtitan, torchtitan_command, torchtitan_registry
from gemmscope.model.spec import ModelSource
from gemmscope.model.torchtitan_model import family_names
from gemmscope.workload.summary import count_parameters

TABLE = Path(__file__).parents[1] / "src/gemmscope/model/torchtitan_jobs.toml"
OTHERS = ("flux", "rl")  # models of images, and jobs that are not pretraining
READ = (  # the settings of a job that are read
    *torchtitan.TOKENS, "num_pp_microbatches", "disable_cuda_graphs", "dtype", "fsdp_reshard_after_forward",
    "enable_sequence_parallel", "enable_async_tensor_parallel", "tensor_parallel_degree", "context_parallel_degree",
    "pipeline_parallel_degree", "expert_parallel_degree", "data_parallel_shard_degree", "data_parallel_replicate_degree",
    "pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage", "mode", "selective_ac_option",
)  # fmt: skip
# Layers, hidden size, parameters of layers, embedding and head (without vision).
BY_HAND = {
    "llama3_debugmodel": (6, 256, 6 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 2 * 2048 * 256 + 256),
    "llama3_8b": (32, 4096, 8_030_261_248),
    "llama3_70b": (80, 8192, 70_553_706_496),
    "llama3_405b": (126, 16384, 405_853_388_800),
    "qwen3_0_6b": (28, 1024, 596_049_920),
    "qwen3_32b": (64, 5120, 32_762_123_264),
    "qwen3_30b_a3b": (48, 2048, 30_532_122_624),
    "deepseek_v3_16b": (27, 2048, 15_706_484_224),
    "deepseek_v3_671b": (61, 7168, 671_026_404_352),
    "gpt_oss_20b": (24, 2880, 20_914_757_184),
    "gpt_oss_120b": (36, 2880, 116_829_156_672),
    "moonlight_16b_a3b": (27, 2048, 15_960_108_544),
    "muse_glimmer_30b": (52, 6656, 27_854_780_928),
    "qwen35_27b": (64, 5120, 26_895_998_464),
}


def registries(folder: Path) -> list[Path]:
    """The registries of all models and experiments."""
    return sorted(
        [*folder.glob("torchtitan/models/*/config_registry.py"), *folder.glob("torchtitan/experiments/**/config_registry.py")]
    )


def jobs(path: Path) -> list[str]:
    """The functions of a registry that return a configuration."""
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return [
        node.name
        for node in functions
        if not node.name.startswith("_") and node.returns and "Config" in ast.unparse(node.returns)
    ]


def read(path: Path, name: str) -> ModelSource:
    """The model and the settings of a job."""
    return torchtitan_registry.read(path.read_text(encoding="utf-8"), path.name, path, name)


def entries(folder: Path) -> Iterator[tuple[str, str]]:
    """Every job with its outcome: answered, refused with the reason, or wrong."""
    for path in registries(folder):
        for name in jobs(path):
            place = str(path.parent.relative_to(folder / "torchtitan"))
            try:
                yield f"{place}:{name}", _outcome(read(path, name), path, name)
            except UserError as error:
                yield f"{place}:{name}", f"refused: {error.message}"


def _outcome(source: ModelSource, path: Path, name: str) -> str:
    assert source.model is not None
    sizes = (len(source.model.layers), source.model.hidden_size, count_parameters(source.model)[0])
    if sizes != BY_HAND.get(name, sizes):
        return f"wrong: {sizes} instead of {BY_HAND[name]}"
    family = family_names().get(path.parent.name)
    if family is None or path.parents[1].name != "models":
        return "answered"
    try:
        command = torchtitan_command.read(f"./run_train.sh --module {family} --config {name}", path.name)
    except UserError:
        return "wrong: the shipped table does not have it"
    assert command.model is not None
    settings = {key for key in source.run_settings if source.run_settings[key] != command.run_settings.get(key)}
    return f"wrong: the shipped table differs {settings}" if command.model != source.model or settings else "answered"


def job_tables(path: Path, function: str) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """The flavor with its converters, and the settings by section, of a job of torchtitan's own."""
    job = torchtitan_registry._job(path.read_text(encoding="utf-8"), path.name, path, function)
    spec = job.get("model_spec")
    depth, converters = torchtitan_registry._model(spec)[0].prediction_layers, torchtitan_registry._at(spec, ["model.converters"])
    optional = {"converters": converters, "num_mtp_layers": depth}
    flavor = torchtitan_registry._at(spec, ["flavor"])
    return {"flavor": flavor, **{name: value for name, value in optional.items() if value}}, torchtitan_registry._tables(job)[0]


def write(folder: Path) -> None:
    """Write the jobs of the models that ship with gemmscope."""
    commit = torchtitan_registry.facts()["commit"]
    lines = [
        "# The jobs of torchtitan's own registries, which commands name with --module and --config: the settings that are read.",
        "#",
        f"# Written by benchmarks/framework_torchtitan.py from github.com/pytorch/torchtitan at {commit}.",
    ]
    for path in registries(folder):
        family = family_names().get(path.parent.name)
        if family is None or path.parents[1].name != "models":
            continue
        for name in jobs(path):
            try:
                model, tables = job_tables(path, name)
            except UserError:
                continue
            lines += ["", f"[{family}.{name}]", f"model = {_inline({'name': family, **model})}"]
            kept = {table: {key: value for key, value in values.items() if key in READ} for table, values in tables.items()}
            lines += [f"{table} = {_inline(values)}" for table, values in kept.items() if values]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _inline(values: dict[str, object]) -> str:
    texts = {
        key: str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"') for key, value in values.items()
    }
    return f"{{ {', '.join(f'{key} = {text}' for key, text in texts.items())} }}"


def main() -> None:
    """Print the outcome of every job, and how many there are of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the table that ships with gemmscope")
    options = parser.parse_args()
    if options.write:
        write(options.folder)
    language: Counter[str] = Counter()
    for name, outcome in entries(options.folder):
        other = any(part in OTHERS for part in Path(name.partition(":")[0]).parts)
        language[outcome.partition(":")[0]] += not other
        print(f"{'other   ' if other else 'language'}  {name}: {outcome}")
    print(f"\nlanguage models: {dict(language)}, {100 * language['answered'] / language.total():.0f}% answered")


if __name__ == "__main__":
    main()
