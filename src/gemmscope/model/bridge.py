"""Megatron-Bridge YAML: a recipe's overrides, or the run_config.yaml that Megatron-Bridge writes beside a checkpoint.

The `model:` section uses Megatron-core's own names, so `megatron_run` reads it nearly as it is; `train:` gives the batch,
`dataset:` the sequence length, `ddp:`, `dist:`, `optimizer:` and `comm_overlap:` what data-parallel ranks share and what
overlaps. A `_target_` names the Python class that gets the values. A class such as `Llama3ModelProvider8B` has sizes of its own,
which are in Megatron-Bridge's code, so they ship as data with gemmscope (`bridge_classes.toml`); what the file says itself
overrides them. For any other class, every setting that decides a shape must be in the YAML.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from gemmscope.errors import UserError, closest, did_you_mean, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.megatron_hybrid import PATTERNS
from gemmscope.model.megatron_model import REQUIRED, other_model
from gemmscope.model.megatron_run import model_source
from gemmscope.model.megatron_settings import FACTS, SIZE_LIKE, MegatronSettings, Unknown
from gemmscope.model.spec import ModelSource, ModelSpec, framework_defaults
from gemmscope.reading import LIMITS
from gemmscope.toml import inherited, load_data

VOCABULARY = "tokenizer_vocabulary"  # of a class
DEFAULTS = framework_defaults("megatron_bridge")
BRIDGE, SECTIONS = FACTS["bridge"], FACTS["bridge_sections"]
SHAPES = [name for kind in ("shapes", "shapes_heads", "shapes_moe", "shapes_mla") for name in BRIDGE[kind]]
TELLTALE = (*REQUIRED, *SHAPES, *FACTS["run_sizes"])
OF_LAYERS = {*REQUIRED, *SHAPES, *BRIDGE["of_layers"], *FACTS["same_name"]}.difference(
    FACTS["run_sizes"], FACTS["run_settings"], BRIDGE["not_of_layers"]
)
"""Settings that decide what the layers are."""
MOST_ALIASES_WITH_MERGES = 20  # merged mappings are copied, and copies of copies grow without bound
MOST_VALUES, LONGEST_NUMBER = LIMITS["config_text"]["entries"], 400
DEEPEST = 100  # levels of nesting; far more would crash the process, because the parser's C code recurses


def recognises(text: str) -> bool:
    """Whether the text is YAML with a Megatron `model:` section.

    >>> recognises("model:\\n  hidden_size: 4096"), recognises("model: llama")
    (True, False)
    """
    section, names = r"^[\"']?model[\"']?[ \t]*:", "|".join(TELLTALE)
    ways = (
        rf"^[ \t]+[\"']?(?:{names})[\"']?[ \t]*:",
        rf"{section}[ \t]*\{{[^\n]*\b(?:{names})\b",
        r"[\s{,]_target_[ \t]*:[ \t]*[\"']?(?:megatron\.|\w{1,80}Provider)",
    )
    return bool(re.search(section, text, re.MULTILINE)) and any(re.search(way, text, re.MULTILINE) for way in ways)


def read(text: str, origin: str) -> ModelSource:
    """The model and run of a Megatron-Bridge YAML file.

    >>> read("model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}", "run.yaml").model.pattern()
    '2 dense'
    """
    return read_document(_load(text), origin)


def read_document(document: Mapping[str, object], origin: str, known: ModelSource | None = None) -> ModelSource:
    """The model and run of a configuration with the sections of a Megatron-Bridge run. `known`: the model, from elsewhere."""
    model = _section(document, document, "model")
    if not model:
        raise UserError(
            "the file has no settings under model:",
            "Megatron-Bridge YAML has the sizes indented under model: such as num_layers: 32",
        )
    given = {**_section(document, model, "transformer"), **model}
    provider = _last_name(given.get("_target_"))
    if provider.startswith("MLA"):
        given.setdefault("multi_latent_attention", True)
    if re.search("mamba|hybrid", provider, re.IGNORECASE):
        given.setdefault("is_hybrid_model", True)
    for start, what in BRIDGE["other_classes"].items():
        if provider.startswith(start):
            raise other_model("model._target_ is the class of", what)
    own = provider_classes().get(provider)
    values = {**(own or {}), **given}
    if any(given.get(name) for name in PATTERNS):  # instead of the class's pattern, which may have the other name
        values |= {name: given.get(name) for name in PATTERNS}
    if known is None:
        _require_sizes_of_class(values, provider, own)
    unknown_names = [f"model.{name}" for name in given if name not in TELLTALE]
    sections = _add_run(values, document)
    of_elsewhere = known.model if known is not None else None
    findings = [*_sequence_length(values, given, document), *_vocabulary(values, document, of_elsewhere)]
    frozen = [f"model.{name}" for name, value in given.items() if name.startswith("freeze_") and value is True]
    if frozen or document.get("peft"):
        findings.append(finding("frozen-parts-not-modelled", settings=[*frozen, *(["peft"] if document.get("peft") else [])]))
    if of_elsewhere is not None and type(size := values.get("vocab_size")) is int:
        of_elsewhere = replace(of_elsewhere, vocab_size=size)
    function = values.get("activation_func")  # written as it is, or as the _target_ of a mapping
    activation = _last_name(function.get("_target_") if isinstance(function, dict) else function)
    if provider.startswith(BRIDGE["window_with_query"]) and type(window := values.get("window_size")) is int:
        values["window_size"] = window - 1
    values["activation_func"] = "relu2" if activation == "squared_relu" else activation or None
    padding = values.get("make_vocab_size_divisible_by")
    padding = DEFAULTS["vocab_multiple"] if padding is None else padding
    values["make_vocab_size_divisible_by"] = padding if values.get("should_pad_vocab") else None

    def spell(name: str) -> str:
        return f"{sections.get(name, 'model')}.{name}"

    settings = MegatronSettings(values, spell, "{}: {}", DEFAULTS)
    earlier = known or ModelSource(origin, None)
    source = model_source(settings, origin, [*earlier.findings, *findings], unknown_names, of_elsewhere)
    return replace(source, unread={**earlier.unread, **_unread(given)})


def _last_name(target: object) -> str:
    """`silu` from `torch.nn.functional.silu`; empty where it is not text."""
    target = target.text if isinstance(target, Unknown) else target
    return target.strip().rpartition(".")[2] if isinstance(target, str) else ""


def _unread(given: Mapping[str, object]) -> dict[str, bool]:
    """Settings that are not read, if they are called like a size or almost like a setting that is: they may change shapes."""
    read = _read_names()
    others = [name for name, value in given.items() if name not in read and value not in (None, False)]
    near = {name: [one for one in read if one[0] == name[:1] and abs(len(one) - len(name)) < 3] for name in others}
    sizes = [name for name in others if SIZE_LIKE.fullmatch(name) or closest(name, sorted(near[name]), 1, cutoff=0.9)]
    return dict.fromkeys((f"model.{name}" for name in sizes), True)


@cache
def _read_names() -> frozenset[str]:
    """The settings of a model that are read, and those that change no shape."""
    of_classes = {name for settings in provider_classes().values() for name in settings}
    lists = ("same_name", "only_here", "switches", "run_settings")
    return frozenset({*TELLTALE, *of_classes, *BRIDGE["no_shapes"], *SECTIONS, *FACTS["other_name"].values()}).union(
        *(FACTS[name] for name in lists)
    )


def _require_sizes_of_class(values: Mapping[str, object], provider: str, own: Mapping[str, object] | None) -> None:
    """Reject a class whose sizes are neither known nor in the file. `own`: what is known of the class."""
    if (
        not provider
        or provider in BRIDGE["plain_classes"]
        or (own and not {"num_layers", "hybrid_layer_pattern"}.isdisjoint(own))
    ):
        return
    latent = values.get("multi_latent_attention") is True
    names = [*REQUIRED, "multi_latent_attention", *BRIDGE["shapes"]]
    names += BRIDGE["shapes_mla" if latent else "shapes_heads"]
    names += BRIDGE["shapes_moe"] if values.get("num_moe_experts") else ()
    if own:  # the base class of a family: its defaults are known, its sizes are not
        names = [*REQUIRED, "ffn_hidden_size"] if "is_hybrid_model" not in own else ["hidden_size"]
    missing = [name for name in names if name not in values or (name in REQUIRED and values[name] is None)]
    if missing:
        which = "a class without sizes" if own else "a class with default sizes that are not known here"
        suggestion = "" if own else did_you_mean(provider, provider_classes())
        raise UserError(
            f"model._target_ is {provider[:80]}, {which}; missing: {', '.join(missing)}",
            f"{suggestion}add them under model: (null for what the model does not have), "
            "or use the run_config.yaml that Megatron-Bridge writes beside a checkpoint, which has them all",
        )


def _add_run(values: dict[str, object], document: Mapping[str, object]) -> dict[str, str]:
    """Add the run settings of other sections to the model's settings, and return the section of each setting."""
    section_of: dict[str, str] = {}
    for name, sections in SECTIONS.items():
        section_of[name] = sections[0]
        for section in sections:
            value = _section(document, document, section).get(name)
            if name.endswith("_dtype"):
                value = _last_name(value.get("_target_") if isinstance(value, dict) else value)
            if value is not None:
                values[name], section_of[name] = value, section
                break
        else:
            values.pop(name, None)
    own = _section(document, document, "comm_overlap")
    if own and own.get("overlap_grad_reduce") is None and values.get("use_distributed_optimizer"):
        values |= {"overlap_grad_reduce": True, "overlap_param_gather": True}  # what the section turns on by itself
    return section_of


def _sequence_length(values: dict[str, object], given: Mapping[str, object], document: Mapping[str, object]) -> list[Finding]:
    """Add the sequence length of the dataset where the file's model has none; a finding where they differ."""
    dataset = _section(document, document, "dataset")
    length, data_length = given.get("seq_length"), dataset.get("sequence_length", dataset.get("seq_length"))
    if length is None and data_length is not None:
        values["seq_length"] = data_length
    elif isinstance(length, int) and isinstance(data_length, int) and length != data_length:
        return [finding("sequence-length-differs", length=shown(length), dataset_length=shown(data_length))]
    return []


def _vocabulary(values: dict[str, object], document: Mapping[str, object], known: ModelSpec | None) -> list[Finding]:
    """Where the model has no vocabulary, or the file says so, it gets the tokenizer's, padded: given, or that of the class."""
    size, tokenizer = values.pop(VOCABULARY, None), _section(document, document, "tokenizer")
    own, given = values.get("vocab_size", known.vocab_size if known else None), tokenizer.get("vocab_size")
    given = None if isinstance(given, Unknown) else given
    if tokenizer.get("use_tokenizer_vocab_size") is True and isinstance(given, int):
        values |= {"vocab_size": given, "should_pad_vocab": True}
        model_size = own if own is not None else size
        return [finding("vocabulary-of-tokenizer", size=given, own=shown(model_size))] if model_size not in (None, given) else []
    if own is not None or not isinstance(size, int | None) or (given is None and size is None):
        return []
    values |= {"vocab_size": size if given is None else given, "should_pad_vocab": True}
    return [finding("vocabulary-of-class", size=size)] if given is None else []


def _load(text: str) -> dict[str, object]:
    import yaml  # imported here, because it would take half the start-up time of a command that reads no YAML

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # faster, where PyYAML was built with it
    try:
        depth = aliases = 0
        for count, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            problem = _problem(depth, count, event.value if isinstance(event, yaml.ScalarEvent) else "")
            if problem:
                start: Any = event.start_mark  # two classes of marks, which versions of the type stubs treat differently
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=start)
        if "<<" in text and aliases > MOST_ALIASES_WITH_MERGES:
            raise UserError(f"too many aliases (*name) with merges (<<): {aliases}", "write the values out instead")
        document = yaml.load(text, Loader=loader)
    # Besides YAMLError: numbers too long for Python, invalid dates, nesting deeper than the stack.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {min(mark.line, text.count(chr(10))) + 1}" if mark else ""  # the end may count as one line more
        reason = str(getattr(error, "problem", None) or type(error).__name__)[:200]
        raise UserError(
            f"the YAML is not valid{where}: {reason}",
            "plain keys and values are enough: model: with num_layers: 32 indented under it",
        ) from None
    if not isinstance(document, dict):
        what = "empty" if document is None else "a list" if isinstance(document, list) else shown(document)
        raise UserError(f"the file is {what}, not a mapping of settings", "write model: with num_layers: 32 indented under it")
    return {key: value for key, value in document.items() if isinstance(key, str)}


def _problem(depth: int, count: int, value: str) -> str:
    """Why the parser would take too long: the depth, the number of values so far, the value; empty if it would not."""
    if depth > DEEPEST:
        return f"nested more than {DEEPEST} deep"
    if count > MOST_VALUES:
        return f"more than {MOST_VALUES} keys and values"
    return "a number with too many digits" if len(value) > LONGEST_NUMBER and re.fullmatch(r"[-+0-9_:.]+", value) else ""


def _section(document: Mapping[str, object], parent: Mapping[str, object], name: str) -> dict[str, object]:
    """A copy of a mapping, with references such as ${model.seq_length} replaced; empty where there is none."""
    section = parent.get(name)
    if not isinstance(section, dict):
        return {}
    return {key: _follow(document, value) for key, value in section.items() if isinstance(key, str)}


def _follow(document: Mapping[str, object], value: object) -> object:
    """The value that a reference points to."""
    for _ in range(5):
        reference = re.fullmatch(r"\$\{([\w.]+)\}", value.strip()) if isinstance(value, str) else None
        if not reference:
            return value
        target: object = document
        for step in reference[1].split("."):
            target = target.get(step) if isinstance(target, dict) else None
        if target is None:
            return Unknown(reference[0], "the file does not set it")
        value = target
    return Unknown("a reference", "it points to another reference, and so on")


@cache
def provider_classes() -> dict[str, dict[str, object]]:
    """The settings of every known class. Classes that leave the sizes open have no `num_layers` and no pattern.

    >>> provider_classes()["Llama3ModelProvider8B"]["hidden_size"]
    4096
    """
    settings: dict[str, dict[str, object]] = {}
    for family in load_data("gemmscope.model", "bridge_classes.toml").values():
        defaults, classes = family.get("defaults", {}), family.get("classes", {})
        settings |= {name: dict(defaults) for name in family.get("bases", ())}
        for name in classes:  # "none" is None, which TOML does not have
            own = {key: None if value == "none" else value for key, value in inherited(classes, name).items() if key != "like"}
            settings[name] = {**defaults, **own}
    return settings
