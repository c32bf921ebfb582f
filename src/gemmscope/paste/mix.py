"""A mix of precisions ready to paste: what is kept in higher precision, in the settings of each framework.

`modules.toml` has the names of the frameworks, with their sources. Transformer Engine and torchao work on the user's own modules
and take the names as they were recorded. Where a framework cannot express a mix, a comment says what its settings do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemmscope.paste.emit import megatron_text, modules, ready_to_paste, templates, with_texts
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.numerics import Mix
from gemmscope.roles import key_of

PER_LAYER = "layers are numbered within their pipeline stage: with pipeline parallelism, use other numbers on each stage"


def mix_to_paste(mix: Mix, linears: Sequence[str], layers: int, *, in_layers: bool = True) -> dict[str, str]:
    """The mix for every framework: framework → text. `linears`, `layers`: those of the model; `in_layers`: False without layers.

    >>> keep = Mix(recipe="MXFP8", higher="BF16", last_layers=2, error=0.03)
    >>> mix_to_paste(keep, ["mlp.down_proj"], 32)["Megatron-LM"].partition("mxfp8 ")[2]
    '--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 2'
    """
    if not mix.is_mixed:
        return ready_to_paste(mix.recipe)
    if any(_op(name) in modules()["ops"] for name in linears):  # without recorded modules, use their usual names
        mix, linears, in_layers = mix.model_copy(update={"linears": tuple(_of_ops(mix.linears))}), _of_ops(linears), True
    settings = recipe(mix.recipe).settings
    kept = tuple(f".{_as_recorded(name)}" for name in mix.linears)
    others = tuple(f".{_as_recorded(name)}" for name in linears if name not in mix.linears)
    common = {
        "mix": mix,
        "first": mix.first_layers,
        "last": mix.last_layers,
        "layers": layers,
        "in_layers": in_layers,
        "linears": kept,
        "others": tuple(name for name in others if name.endswith(kept)),  # of another stack of layers, such as an encoder
        "left_out": (),
    }
    texts = {}
    higher = {framework.name: name for framework, name in with_texts("mix", recipe(mix.higher))}
    for framework, own in with_texts("mix", recipe(mix.recipe)):
        other = higher.get(framework.name, "")
        if other or mix.higher == BASELINE:
            texts[framework.title] = _rendered(framework.paste["mix"], {**common, "name": own, "higher": other})
    if (titan := settings.get("torchtitan")) is not None:
        texts["torchtitan"] = _torchtitan(mix, layers, titan)
    if "megatron" in settings:
        texts["Megatron-LM"] = _megatron(mix, linears, layers)
    return texts


def _of_ops(names: Sequence[str]) -> list[str]:
    """The linears that these ops consist of."""
    return list(dict.fromkeys(linear for name in names for linear in modules()["ops"].get(_op(name), [name])))


def _op(name: str) -> str:
    """The role of an op, without the kind of layer that may stand behind its name."""
    return key_of(name.partition(",")[0])


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    return templates().get_template(template).render(**values).rstrip()


def _as_recorded(name: str) -> str:
    """A module's name without the wildcard of experts."""
    return ".".join(part for part in name.split(".") if part != "*")


def _in_quotes(name: str) -> str:
    """A module's name inside the double quotes of TOML or YAML, or in a comment: a name from a file adds no line to paste.

    >>> _in_quotes('experts.*.up"\\n--load')
    'experts.up\\\\"\\\\U0000000a--load'
    """
    text = _as_recorded(name).encode("utf-8", "replace").decode()
    escaped = {'"': '\\"', "\\": "\\\\"}
    return "".join(escaped.get(one, one) if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _torchtitan(mix: Mix, layers: int, titan: Mapping[str, Any]) -> str:
    """The converter and the names to leave out, which stay in BF16 whatever the mix says."""
    ends = [f"layers.{layer}." for layer in (*range(mix.first_layers), *range(layers - mix.last_layers, layers))]
    names = [_name_in("torchtitan", name) or _in_quotes(name) for name in mix.linears]
    notes = [] if mix.higher == BASELINE else [f"torchtitan keeps these in {BASELINE}: one converter has one recipe"]
    if any("experts" in name for name in names):
        notes.append("experts are converted only by quantize.grouped_mm: remove them from its fqns")
    values = {
        "converter": titan["converter"],
        "name": titan["recipe"],
        "nearest": titan["nearest"],
        "notes": notes,
        "recipe": mix.recipe,
    }
    return _rendered("torchtitan.j2", {**values, "left_out": list(dict.fromkeys([*ends, *names]))})


def _megatron(mix: Mix, linears: Sequence[str], layers: int) -> str:
    """Flags for the first and last layers, a file for linears; delayed scaling takes neither."""
    patterns, notes = list[str](), list[str]()
    first, last = mix.first_layers, mix.last_layers
    if (first or last) and mix.higher != BASELINE:  # the flags support only BF16
        first = last = 0
        places = (*range(mix.first_layers), *range(layers - mix.last_layers, layers))
        patterns += [f"*layers.{layer}.*" for layer in places]
        notes.append(PER_LAYER)
    for linear in mix.linears:
        known_as = _name_in("megatron", linear)
        patterns.append(f"*.{known_as or _in_quotes(linear)}")
        if known_as is None:
            notes.append(f"{_in_quotes(linear)} is the recorded name: use its name in your Megatron-LM model")
        elif others := [other for other in linears if _name_in("megatron", other) == known_as and other not in mix.linears]:
            notes.append(
                f"{known_as} of Megatron-LM also holds {' and '.join(map(_in_quotes, others))}, which stay in the higher "
                f"precision with {_in_quotes(linear)}"
            )
    return megatron_text(mix.recipe, mix.higher, first=first, last=last, patterns=list(dict.fromkeys(patterns)), notes=notes)


def _name_in(framework: str, linear: str) -> str | None:
    """What a framework calls a linear; None where that is not known.

    >>> _name_in("megatron", "mlp.experts.down_proj"), _name_in("torchtitan", "self_attn.q_proj"), _name_in("megatron", "x.y")
    ('experts.*linear_fc2', 'attention.wq', None)
    """
    *path, last = _as_recorded(linear).split(".")
    known = modules()["linears"]
    name = known.get(".".join([*path[-1:], last]), known.get(last, {})).get(framework)
    if name is None:
        return None
    kind = "shared" if any("shared_expert" in part for part in path) else "routed" if "experts" in path else ""
    if not kind:
        return str(name)
    place = modules()["experts"][kind][framework]
    module, _, own = str(name).rpartition(".")
    return f"{place}{own}" if framework == "megatron" else str(place) if module == "feed_forward" else str(name)
