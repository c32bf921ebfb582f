"""Roles: what every op of a training step is, as facts in `roles.toml`.

Code asks for the facts of an op's role. Names are for people: no code looks at them, except here, where what people type and what
run files store is read back. The keys of linears contain a hyphen, so that none is taken for the path of a module.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from gemmscope.parts import StepPart
from gemmscope.toml import FactTable, complete, load_data

Block = Literal["", "attention", "mixer", "MLP", "experts", "shared expert"]
KitPart = Literal[
    "", "qkv", "attn out", "mlp up", "mlp down", "experts up", "experts down", "shared expert up", "shared expert down"
]  # fmt: skip
Tensor = Literal[
    "", "attention input", "query latent", "key and value latent", "context", "MLP input", "activated", "expert input",
    "expert activated",
]  # fmt: skip


@dataclass(frozen=True)
class Role:
    """The facts of one role.

    Of linears: `block` is the block of a layer that it belongs to, and `ends_block` marks its last one. `stays_high`: why
    frameworks leave it in BF16 whatever the recipe ("exact": its values decide something; "small": a cast costs more than its
    GEMM gains; "published": as in the published FP8 checkpoints); `usually_high`: most of them do, but recipes can quantize it.
    `reads` is the tensor that it reads, which linears that read the same one keep once ("": one of its own); `reads_shard`: with
    sequence parallelism, each rank keeps its part of it. `kit_part` is the part of a layer that a measured step can run in a
    precision of its own. `consists_of` are the linears that it is where a framework stores them apart, and `piece` is what
    distinguishes such a linear in the names of modules.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    name: str
    part: StepPart
    block: Block = ""
    ends_block: bool = False
    stays_high: Literal["", "exact", "small", "published"] = ""
    usually_high: bool = False
    reads: Tensor = ""
    reads_shard: bool = False
    routes: bool = False  # it chooses experts
    kit_part: KitPart = ""
    consists_of: tuple[str, ...] = ()
    piece: str = ""
    kept_unfused: bool = False  # where kernels are not fused, backward also needs its input (of a linear: its output)
    bandwidth: str = ""  # the share of the bandwidth that it reaches (`training.toml`), if not that of its kind
    uncertainty: Literal["bandwidth", "attention", "linear attention", "sparse attention"] = "bandwidth"  # a table there


@cache
def _roles() -> FactTable:
    adapter, table = TypeAdapter(Role), load_data("gemmscope", "roles.toml")
    return FactTable({key: adapter.validate_python(complete(Role, facts)) for key, facts in table.items()}, table.file)


@cache
def _by_name() -> dict[str, str]:
    return {known.name: key for key, known in reversed(_roles().items())}  # of two with one name, the first


def role(key: str) -> Role:
    """The facts of a role.

    >>> role("qkv-proj").consists_of, role("rotary").part
    (('q-proj', 'k-proj', 'v-proj'), 'attention')
    """
    known: Role = _roles()[key]
    return known


def role_named(name: str) -> Role | None:
    """The facts of the op that a result names; None if it is no role, such as a path of a traced module.

    >>> role_named("MLP Down") is role("mlp-down"), role_named("blocks.*.proj")
    (True, None)
    """
    return _roles().get(_by_name().get(name, ""))


def key_of(name: str) -> str:
    """The key of the role with this name; any other text stays as it is.

    >>> key_of("MLP Down"), key_of("blocks.*.proj")
    ('mlp-down', 'blocks.*.proj')
    """
    return _by_name().get(name, name)


def name_of(key: str) -> str:
    """What people call an op with this key: the name of its role, or its path.

    >>> name_of("mlp-down"), name_of("blocks.*.proj")
    ('MLP Down', 'blocks.*.proj')
    """
    return role(key).name if key in _roles() else key


def kit_part(key: str) -> KitPart:
    """The part of a layer that an op belongs to; empty if a kit cannot run it in a precision of its own."""
    return role(key).kit_part if key in _roles() else ""


def pieces(key: str) -> tuple[str, ...]:
    """The linears that this one consists of where a framework stores them apart; else itself.

    >>> pieces("qkv-proj"), pieces("mlp-down")
    (('q-proj', 'k-proj', 'v-proj'), ('mlp-down',))
    """
    return (role(key).consists_of if key in _roles() else ()) or (key,)
