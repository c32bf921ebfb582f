"""A model from plain hyperparameters: hidden size, intermediate size, heads and layers.

They describe only the layers of a classic transformer (multi-head attention, plain MLP, no biases, no rotary positions): without
a vocabulary there is no embedding and no head. The optional sizes add grouped-query attention, a gated MLP and a vocabulary.
"""

from gemmscope.errors import UserError, option
from gemmscope.model.limits import check_size, divisors_text
from gemmscope.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec


def from_hyperparameters(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_hidden_layers: int,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    gated: bool = False,
    name: str = "",
    source: str = "",
) -> ModelSpec:
    """A uniform decoder with these sizes.

    >>> from_hyperparameters(hidden_size=8, intermediate_size=32, num_attention_heads=2, num_hidden_layers=3).pattern()
    '3 dense'
    """
    hidden = check_size(option("hidden_size"), hidden_size, "hidden_size")
    heads = check_size(option("num_attention_heads"), num_attention_heads, "heads")
    if head_dim is None:
        head_dim = head_size(hidden, heads)
    layer = LayerSpec(
        attention=AttentionSpec(
            heads=heads, kv_heads=heads if num_key_value_heads is None else num_key_value_heads, head_dim=head_dim, rotary=False
        ),
        mlp=MlpSpec(intermediate_size, gated=gated, activation="silu" if gated else "gelu"),
    )
    layers = check_size(option("num_hidden_layers"), num_hidden_layers, "layers")
    return ModelSpec(
        name=name or "transformer", hidden_size=hidden, layers=(layer,) * layers, vocab_size=vocab_size, source=source
    )


def head_size(hidden: int, heads: int) -> int:
    """The default size of a head: hidden / heads, which must be a whole number.

    >>> head_size(4096, 32)
    128
    """
    if hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and head_dim is not given",
            f"numbers of heads that divide {hidden}: {divisors_text(hidden, most=16)}; or set head_dim",
        )
    return hidden // heads
