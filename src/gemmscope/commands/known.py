"""The models and GPUs that have a name: their lists, and what words on the command line mean."""

import re
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import shorten
from typing import Any

from gemmscope.document.table import Cell, Column, Table, across, table
from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.gpu.specs import OTHER_VENDORS, TOO_OLD, gpu, gpus, spec_of
from gemmscope.model import presets
from gemmscope.units import parameters

LISTS = "gemmscope models and gemmscope gpus list the names"
SIZED = re.compile(r"([0-9]+) ?x ?([a-z].*)", re.IGNORECASE)  # 8xh200
WAYS = ("preset", "config", "module")
ACROSS = 4  # columns of names
WIDEST = 66  # characters of a description
FILE = re.compile(r"/|\.(json|toml|ya?ml|sh|py|txt|args)$", re.IGNORECASE)


def model_table(search: Sequence[str] = ()) -> Table:
    """The names of all presets; of those that have these words, the sizes too."""
    if not search:
        names, rows = presets.names(), ceil(len(presets.names()) / ACROSS)
        columns: Iterable[Column[int]] = across(
            range(ACROSS), lambda row, place: "".join(names[place * rows + row :][:1]), head=lambda _: " "
        )
        return table("models", "Models (gemmscope models WORD searches, and shows their sizes)", range(rows), *columns)
    return table(
        "models",
        "Models",
        _matching([presets.describe(name) for name in presets.names()], search, "model", presets.names()),
        Column("Name", lambda preset: preset.name),
        Column("Parameters", lambda one: Cell(parameters(one.parameters), one.parameters) if one.parameters else "", "g"),
        Column("Description", lambda preset: shorten(preset.description, WIDEST, placeholder=" …")),
    )


def gpu_table(search: Sequence[str] = ()) -> Table:
    """The GPUs that can be forecast, with their published rates, of those words only."""
    return table(
        "gpus",
        "GPUs: published rates in dense TFLOP/s, memory in GB, bandwidth in TB/s",
        _matching(gpus().values(), search, "GPU", gpus()),
        Column("Name", lambda chip: chip.name),
        Column("GPU", lambda chip: chip.title),
        Column("GB", lambda chip: chip.memory_gb, "g"),
        Column("TB/s", lambda chip: chip.bandwidth_tbps, "g"),
        Column("BF16", lambda chip: chip.tflops["bf16"], "g"),
        Column("FP8", lambda chip: chip.tflops.get("fp8"), "g"),
        Column("FP4", lambda chip: chip.tflops.get("fp4"), "g"),
        Column("sm", lambda chip: chip.architecture),
    )


def _matching(known: Iterable[Any], search: Sequence[str], what: str, names: Iterable[str]) -> list[Any]:
    """Those whose facts contain every word; a `UserError` if there are none."""
    fitting = [one for one in known if all(word.lower() in str(one).lower() for word in search)]
    if fitting:
        return fitting
    if what == "GPU":
        gpu(" ".join(search))  # says why it is not there
    message = f"no {what} has {' '.join(map(shown, search))} in its name or description"
    raise UserError(message, did_you_mean(search[0], names) + LISTS)


def named(
    positional: Sequence[str], command: str, takes: Sequence[str], given: Sequence[str], *, own: bool
) -> tuple[list[str], list[str]]:
    """The options that words stand for, in any order: a model, GPUs, and their number (8xh200); and the words that are something
    else. `takes`: the options gpu and gpus, if the command has them; `own`: it also has words of its own, which are files."""
    models, chips, counts, others = dict[str, str](), list[str](), list[str](), list[str]()
    for word in positional:
        is_file, preset = Path(word).is_file() or Path(word, "config.json").is_file(), presets.named(word)
        sized = SIZED.fullmatch(word) if "gpus" in takes else None
        parts = (sized[2] if sized else word).split(",")
        is_gpu, is_preset = all(_is_gpu(part) for part in parts), preset is not None
        if own and (is_file or not (is_preset or is_gpu)):
            others.append(word)
        elif is_file and (is_gpu or is_preset):
            kind, what = ("gpu", "GPU") if is_gpu else ("preset", "preset")
            hint = f"{option(kind, word)} for the {what}, {option('config', f'./{word}')} for the file"
            raise UserError(f"{word} is the name of a {what} and of a file here", hint)
        elif is_gpu and "gpu" in takes:
            chips += parts
            counts += [sized[1]] if sized else []
        elif is_gpu:
            message = f"gemmscope {command} takes no name of a GPU, but got {word}"
            raise UserError(message, f"remove it; to forecast another GPU: gemmscope forecast MODEL {word}")
        elif is_preset or is_file or FILE.search(word.rpartition(":")[0] or word):
            models[preset or word] = "preset" if is_preset else "module" if ".py:" in word else "config"
        else:
            raise _unknown(word, takes)
    if len(models) > 1:
        raise UserError(f"{len(models)} models are named: {', '.join(models)}", "name one of them")
    options = {kind: word for word, kind in models.items()}
    options |= {name: ",".join(dict.fromkeys(values)) for name, values in (("gpu", chips), ("gpus", counts)) if values}
    for name, value in options.items():
        same = WAYS if name in WAYS else (name,)
        if twice := [flag for flag in (word.partition("=")[0] for word in given) if flag.removeprefix("--") in same]:
            raise UserError(f"{value} and {twice[0]} name the same thing twice", "keep one of them")
    return [text for name, value in options.items() for text in (f"--{name}", value)], others


def is_name(word: str) -> bool:
    """Whether it is the name of a model or a GPU."""
    return presets.named(word) is not None or _is_gpu(word)


def _is_gpu(word: str) -> bool:
    return word.strip().lower().replace("_", "-") in gpus() or spec_of(word) is not None


def _unknown(word: str, takes: Sequence[str]) -> UserError:
    """The error for a word that is neither a model nor a GPU: with close names, or the reason why there is no such GPU."""
    if re.search(f"{OTHER_VENDORS}|{TOO_OLD}", word.lower()) and "gpu" in takes:
        try:
            gpu(word)
        except UserError as error:
            return error
    if word.isdigit() and "gpus" in takes:
        return UserError(f"{word} is neither a model nor a GPU", f"the number of GPUs is {option('gpus', word)}, or {word}xh200")
    known = [*presets.names(), *(gpus() if "gpu" in takes else ())]
    what = "neither a model nor a GPU" if "gpu" in takes else "not a model"
    return UserError(
        f"{shown(word)} is {what}", f"{did_you_mean(word.lower(), known)}{LISTS}; {option('config', 'PATH')} names a file"
    )
