"""Which mixes to price: the one that a run of `gemmscope numerics` chose, or what the user keeps in BF16.

Linears are named as modules are (mlp.down_proj), or as `gemmscope shapes` names their op (MLP Down). A mix is then a recipe like
any other: its name says what it keeps (`recipe/kept.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.numerics.evaluation.mixes import mismatch
from gemmscope.numerics.names import name_linears
from gemmscope.recipe.kept import KeptHigher, mixed_name
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.base import ModelSummary, Result, command_of
from gemmscope.results.numerics import LinearError, NumericsResult
from gemmscope.results.read import read_result
from gemmscope.roles import name_of, pieces, role
from gemmscope.workload.derive import EMBEDDING, HEAD, Workload, derive
from gemmscope.workload.ops import Linear

EXAMPLE = "first=1,last=2,mlp.down_proj"
MOST_NAMES = 200
_COUNT = re.compile(r"(?P<end>first|last)\s*=\s*(?P<count>[0-9]{1,5})")


@dataclass(frozen=True)
class MixRequest:
    """What is kept higher. `recipe` is that of the rest; None: every one that quantizes."""

    given: str
    """The option as it was typed, for messages."""
    kept: KeptHigher
    """Its ops are linears as they were named."""
    recipe: str | None = None
    errors: tuple[LinearError, ...] = ()
    """Those that the mix was chosen by."""


@dataclass(frozen=True)
class Mixes:
    """The names of the mixes to price, and what there is to know about them."""

    names: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def requested_mix(mix: str | Path | Result | None, keep_higher: str | None) -> MixRequest | None:
    """What `mix` (a result of numerics, or its run file) or `keep_higher` ask for; None if neither is given."""
    if mix is not None and keep_higher is not None:
        message = f"{option('mix')} and {option('keep_higher')} both set what to keep in a higher precision"
        raise UserError(message, "use only one of them")
    if keep_higher is not None:
        return _parsed(keep_higher)
    return _chosen(mix) if mix is not None else None


def _parsed(text: str) -> MixRequest:
    """What `keep_higher` asks for.

    >>> _parsed("first=1, mlp.down_proj").kept.ops
    ('mlp.down_proj',)
    """
    given = option("keep_higher", text)
    counts, linears = {"first": 0, "last": 0}, list[str]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        if (match := _COUNT.fullmatch(part)) is not None:
            counts[match["end"]] = int(match["count"])
        elif "=" in part:
            raise UserError(
                f"{option('keep_higher')} {shown(part)} is not known", f"for example {option('keep_higher', EXAMPLE)}"
            )
        else:
            linears.append(part)
    if not any(counts.values()) and not linears:
        raise UserError(f"{option('keep_higher')} keeps nothing", f"for example {option('keep_higher', EXAMPLE)}")
    if len(linears) > MOST_NAMES:
        raise UserError(f"{option('keep_higher')} names {len(linears)} linears, more than {MOST_NAMES}", "name fewer")
    return MixRequest(given, KeptHigher(BASELINE, counts["first"], counts["last"], tuple(dict.fromkeys(linears))))


def _chosen(mix: str | Path | Result) -> MixRequest:
    """The mix that a run of numerics chose."""
    given = f"{option('mix')} {shown(str(mix))}" if isinstance(mix, (str, Path)) else option("mix")
    result = read_result(mix, ("numerics",)) if isinstance(mix, (str, Path)) else mix
    if not isinstance(result, NumericsResult):
        raise UserError(f"{given} is a result of {command_of(result.kind)}", "a mix comes from gemmscope numerics")
    chosen = result.mixed.chosen if result.mixed is not None else None
    if chosen is None:
        bound = "no mix is below its bound" if result.mixed is not None and result.mixed.bound is not None else "it has no bound"
        raise UserError(f"{given} has no chosen mix: {bound}", f"run gemmscope numerics with {option('bound')}, such as 5%")
    kept = KeptHigher(chosen.higher, chosen.first_layers, chosen.last_layers, chosen.linears)
    return MixRequest(given, kept, chosen.recipe, result.linears)


def quantized_ops(model: ModelSpec | None, run: RunSpec, workload: Workload) -> tuple[str, ...]:
    """The linears that a recipe quantizes, of all pipeline stages."""
    if model is not None and run.pp > 1:
        whole = RunSpec(run.micro_batch_size, run.sequence_length, separate_projections=run.separate_projections)
        workload = derive(model, whole)
    ops = [op for op in workload.ops if isinstance(op, Linear) and op.quantized and op.section not in (HEAD, EMBEDDING)]
    return tuple(dict.fromkeys(op.key for op in ops))


def priced_mixes(request: MixRequest, names: Sequence[str], ops: Sequence[str], model: ModelSpec | None) -> Mixes:
    """The mixes of these recipes for a model (None where only its ops are known) with these quantized ops."""
    kept_layers = request.kept.first_layers + request.kept.last_layers
    if model is not None and kept_layers > len(model.layers):
        raise UserError(f"{request.given} keeps {kept_layers} layers, but the model has {len(model.layers)}", "keep fewer")
    chosen, findings = _ops(request, tuple(ops))
    if model is not None and (reason := mismatch(request.errors, ModelSummary.of(model, model.name, model.source))):
        findings.insert(0, finding("mix-other-model", model=model.name, reason=reason))
    kept = replace(request.kept, recipe=recipe(request.kept.recipe).name, ops=chosen)
    low = [request.recipe] if request.recipe is not None else [name for name in names if recipe(name).quantizes]
    if not low:
        raise UserError(
            f"{request.given} keeps linears in {kept.recipe}, but no recipe here has a lower precision",
            f"add {option('recipes', 'fp8current')}",
        )
    if not kept.anything:
        findings.append(finding("mix-keeps-nothing", recipe=recipe(low[0]).name))
    return Mixes(tuple(mixed_name(recipe(name).name, kept) for name in low), tuple(findings))


def _ops(request: MixRequest, present: tuple[str, ...]) -> tuple[tuple[str, ...], list[Finding]]:
    """The ops of the named linears, in the order of the model; a `UserError` for names that the model does not have."""
    kept: set[str] = set()
    named = {name: tuple(_present(name, present)) for name in request.kept.ops}
    for name, ops in named.items():
        if not ops:
            names = tuple(map(name_of, present))
            raise UserError(
                f"{request.given} names {shown(name)}, which is not a linear of this model",
                f"{did_you_mean(name, names)}the model has {', '.join(names) or 'none that a recipe quantizes'}",
            )
        kept.update(ops)
    parts = {op: [name for name, ops in named.items() if ops == (op,) and name.lower() != name_of(op).lower()] for op in kept}
    findings = [
        finding("mix-whole-gemm", linears=names, op=name_of(op), recipe=request.kept.recipe)
        for op, names in parts.items()
        if names and len(names) < len(pieces(op)) and not any(_fused(name) for name in names)
    ]
    return tuple(op for op in present if op in kept), findings


def _fused(name: str) -> bool:
    """Whether a module holds all of such a GEMM: qkv_proj, gate_up_proj."""
    last = name.rpartition(".")[2].lower()
    return (
        "qkv" in last
        or ("gate" in last and "up" in last)
        or not re.search("^[qkv]_|^w[qkv]$|query|key|value|gate|up|^w[13]$", last)
    )


def _present(name: str, present: Sequence[str]) -> Iterator[str]:
    """The ops of a linear that the model has: by their own name, by a module's path, or by how frameworks name modules."""
    same = [op for op in present if name_of(op).lower() == name.lower()]
    paths = [op for op in present if "." in op and (op == name or op.endswith(f".{name}"))]  # of a traced module
    if same or paths:
        yield from same or paths
        return
    op = name_linears({name: (1, 1)})[name].role
    last = name.rpartition(".")[2].lower()
    if op in present:
        yield op
    elif len(pieces(op)) > 1:
        parts = [part for part in present if set(pieces(part)) & set(pieces(op))]
        only = [part for part in parts if _names_piece(last, part)]
        yield from only if len(only) == 1 else parts


def _names_piece(module: str, op: str) -> bool:
    """Whether a module's name says that it is this part of a fused linear: q_proj, gate_proj."""
    piece = role(op).piece
    return bool(piece) and (module.startswith(f"{piece}_") if len(piece) == 1 else piece in module)
