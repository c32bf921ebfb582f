"""The GPUs of `specs.toml` as objects, and the names by which people choose one."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from gemmscope.errors import UserError, shown
from gemmscope.toml import complete, load_data

LEAST_POWER = 0.4  # of the usual limit: with less, clocks leave the range that forecasts cover
TOO_OLD = r"^(tesla-?)?(v100|p100|t4|k80|p4|p40|gtx.*|rtx-?20\d\d.*|titan.*)$"
OTHER_VENDORS = r"^mi\d|^amd|instinct|radeon|gaudi|^tpu|trainium|ascend"
POSITIVE = Field(gt=0, allow_inf_nan=False)
_described: dict[str, "GpuSpec"] = {}


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. `tflops` are dense rates by format (bf16, fp8, fp4); the other fields carry their unit in their name.

    `sustained_tflops` are the rates that its power limit allows, where that is known to be far less; `usual_share` is what large
    GEMMs reach of `tflops` in training. `network`, `nvlink_domain` and `host_gbps` are those of its usual system,
    `collectives_of` is the GPU whose measured collectives are taken; `collectives_slower`: how much longer their bytes take here.
    """

    name: str
    device: str
    title: str
    capability: Annotated[tuple[int, int], BeforeValidator(lambda text: text.split("."))]
    sms: Annotated[int, POSITIVE]
    memory_gb: Annotated[float, POSITIVE]
    memory_mib: Annotated[int, POSITIVE]
    bandwidth_tbps: Annotated[float, POSITIVE]
    tflops: Mapping[str, Annotated[float, POSITIVE]]
    usual_share: Annotated[float, POSITIVE]
    network: str
    nvlink_domain: Annotated[int, POSITIVE]
    host_gbps: Annotated[float, POSITIVE]
    collectives_of: str
    source: str
    collectives_slower: float = 1.0
    disagreements: str = ""
    sustained_tflops: Mapping[str, Annotated[float, POSITIVE]] = field(default_factory=dict)
    power_w: float = 0.0  # its usual power limit; 0: not known
    power_limit_w: float | None = None  # the one that it is set to, if lower

    def limited_to(self, watts: float, by: str) -> "GpuSpec":
        """The same GPU with a lower power limit, which `by` sets; a `UserError` if it is beyond the range.

        >>> gpu("h100").limited_to(500, "--power-limit 500").title
        'H100 SXM5 80 GB at 500 W'
        """
        least = LEAST_POWER * self.power_w
        if not self.power_w:
            raise UserError(f"{by}: the usual power limit of {self.name} is not known", f"add power_w to {self.source}")
        if not least <= watts <= self.power_w:
            raise UserError(f"{by} is beyond the range of {self.name}", f"give {least:g} to {self.power_w:g} W")
        return replace(self, power_limit_w=watts, title=f"{self.title} at {watts:g} W" if watts < self.power_w else self.title)

    @property
    def architecture(self) -> str:
        """The compute capability as text.

        >>> gpu("b300").architecture
        '10.3'
        """
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def memory_bytes(self) -> float:
        """The memory as the driver reports it.

        >>> round(gpu("h100").memory_bytes / 1e9, 1)
        85.5
        """
        return float(self.memory_mib * 2**20)


GB = float(1 << 30)
"""Bytes of a GB of memory, as vendors, drivers and PyTorch count it: an H100 of 80 GB has 79.6 of them."""


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """All GPUs by name."""
    table, read = load_data("gemmscope.gpu", "specs.toml"), TypeAdapter(GpuSpec).validate_python
    own = {name: {"name": name, "collectives_of": facts.get("collectives_of", name)} for name, facts in table.items()}
    return {name: read(complete(GpuSpec, facts, **own[name])) for name, facts in table.items()}


def gpu(name: str) -> GpuSpec:
    """The GPU of that name, or of the name that the driver gives it; case, spaces, underscores and a leading "nvidia" do not
    matter.

    >>> gpu("B200").sms, gpu("rtx_pro_6000").name, gpu("NVIDIA H100 80GB HBM3").name
    (148, 'rtx-pro-6000', 'h100')
    """
    wanted = _plain(name)
    if (known := gpus().get(wanted) or _described.get(wanted) or spec_of(name)) is not None:
        return known
    if re.search(OTHER_VENDORS, wanted):
        raise UserError(
            f"{shown(name)} is not an NVIDIA GPU: no kernel of other vendors was measured, so nothing can be forecast for it",
            f"GPUs that can be forecast: {', '.join(gpus())}",
        )
    if re.search(TOO_OLD, wanted):
        message = (
            f"{shown(name)} is older than Ampere: its tensor cores have neither BF16 nor FP8, so nothing can be forecast for it"
        )
        raise UserError(message, f"GPUs that can be forecast: {', '.join(gpus())}")
    raise UserError(f"unknown GPU {shown(name)}", f"known GPUs, the closest name first: {', '.join(by_likeness(wanted))}")


def described(facts: Mapping[str, Any], name: str) -> GpuSpec:
    """A GPU of the user's own: the fields of `specs.toml`, those that `like` names taken from a known GPU. It is known by its
    name from then on.

    >>> described({"like": "h100", "title": "H100, 500 W", "bandwidth_tbps": 2.4}, "my-h100").memory_gb
    80.0
    """
    like = gpu(str(facts["like"])) if "like" in facts else None
    own = {key: value for key, value in facts.items() if key != "like"}
    if unknown := [key for key in own if key not in (known := [field.name for field in fields(GpuSpec)])]:
        raise UserError(f"{name}.toml: {shown(unknown[0])} is not a fact of a GPU", f"facts: {', '.join(known)}")
    others: dict[str, Any] = {"collectives_of": name}
    if like is not None:
        others = {**asdict(like), "capability": like.architecture}
        own |= {"tflops": {**like.tflops, **own["tflops"]}} if isinstance(own.get("tflops"), Mapping) else {}
    hint = 'give it, or take the rest from a known GPU: like = "h100"'
    try:
        spec = TypeAdapter(GpuSpec).validate_python({**others, "device": "(?!)", "source": f"{name}.toml", **own, "name": name})
    except ValidationError as error:
        wrong = error.errors()
        if missing := [str(one["loc"][0]) for one in wrong if one["type"] == "missing"]:
            raise UserError(f"{name}.toml lacks {', '.join(missing)}", hint) from None
        where = ".".join(map(str, wrong[0]["loc"]))
        raise UserError(f"{name}.toml: {where}: {wrong[0]['msg']}", "see gpu/specs.toml") from None
    if "bf16" not in spec.tflops:
        raise UserError(f"{name}.toml lacks tflops.bf16", hint)
    if spec.power_limit_w is not None:
        limited = spec.limited_to(spec.power_limit_w, f"{name}.toml: power_limit_w = {spec.power_limit_w:g}")
        spec = replace(limited, title=own.get("title", limited.title))
    _described[_plain(name)] = spec
    return spec


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")


def spec_of(device: str) -> GpuSpec | None:
    """The GPU that the driver, or a trace, gives this name; None if it is not in the table.

    >>> [spec.name for name in ("NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3") if (spec := spec_of(name))]
    ['gb200', 'h200-nvl', 'h100']
    >>> [spec_of(name) for name in ("NVIDIA H100 PCIe", "NVIDIA RTX A1000", "NVIDIA GH200 480GB")]
    [None, None, None]
    """
    return next((spec for spec in gpus().values() if re.search(rf"\b(?:{spec.device})\b", device)), None)


def by_likeness(name: str) -> list[str]:
    """All names, the one most similar to `name` first.

    >>> by_likeness("b3000")[0], by_likeness("rtx5090")[0]
    ('b300', 'rtx-5090')
    """
    return sorted(gpus(), key=lambda known: -difflib.SequenceMatcher(None, name, known).ratio())
