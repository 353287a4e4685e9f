"""One attention call, of a mechanism or of the library, on random queries, keys and values."""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosshead.modeling.configuration import complete_mixers, layer_settings, shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, Mechanism, Settings
from crosshead.modeling.ops import split_heads

from .pairs import Run

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From query, key and value (B, heads, T, d) to outputs (B, T, H, d)."""
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""An attention function, as transformers registers them."""
SEED = 0
COLD_BYTES = 2**28
"""Of the rival's keys and values, in all turns together: more than a processor's cache holds."""


def attention(
    attend: Attend,
    tokens: int,
    heads: int,
    head_dim: int,
    gradients: bool,
    parameters: Iterable[torch.Tensor] = (),
) -> Run:
    """The call, or the call and the gradients of its inputs and parameters; the same inputs whoever attends."""
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, heads, tokens, head_dim, requires_grad=gradients) for _ in range(3)]
    given = torch.randn(1, tokens, heads, head_dim)
    wanted = [*inputs, *parameters]

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs)

    def forward_and_backward() -> object:
        return torch.autograd.grad(attend(*inputs), wanted, given)

    return forward_and_backward if gradients else forward


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """torch's own attention, causal or under a mask, by the fastest kernel it has for this."""
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None).transpose(1, 2)


def stock(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """As a stock model attends with "sdpa": query heads may share keys."""
    layer: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    return sdpa_attention_forward(layer, query, key, value, mask, scaling=query.shape[-1] ** -0.5)[0]


def layers_in_turn(
    batch: int, heads: int, tokens: int, head_dim: int, rivals: int, side_by_side: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of as many layers as are cold by the time that their turn comes again, as in a model.

    `rivals` are the heads of the rival, which has as many layers; `side_by_side` is how a token's heads lie.
    """
    held = torch.get_default_dtype().itemsize
    turns = max(1, -(-COLD_BYTES // (2 * batch * rivals * tokens * head_dim * held)))

    def made() -> torch.Tensor:
        if side_by_side:
            return split_heads(torch.randn(batch, tokens, heads * head_dim), head_dim)
        return torch.randn(batch, heads, tokens, head_dim)

    return cycle([(made(), made()) for _ in range(turns)])


def in_one_layer(name: str, options: Settings, layout: HeadLayout) -> Mechanism:
    """A mechanism as it stands alone in a layer of this shape, in evaluation."""
    settings = layer_settings(complete_mixers({name: options}, [layout]), 0)
    return MECHANISMS[name](shared_layout(settings, layout), settings[name]).eval()


def mixed(
    mechanism: Mechanism,
    state: AttentionState,
    mask: torch.Tensor | None = None,
    implementation: str = "sdpa",
    function: Forward | None = None,
) -> torch.Tensor:
    """As a layer with this mechanism alone attends; without a mask, each query sees the keys up to its own.

    It runs the registered function that the mechanism names, or another one with the same arguments.
    """
    state.function = mechanism.attention_function(state, implementation, mask is not None)
    mechanism.after_cache(state)
    layer: Any = SimpleNamespace(
        num_key_value_groups=state.query.shape[1] // state.key.shape[1], is_causal=True, training=False
    )
    if function is None:
        function = ALL_ATTENTION_FUNCTIONS[state.function or implementation]
    scaling = state.query.shape[-1] ** -0.5
    options = {"dropout": 0.0, "scaling": scaling, **state.attention_kwargs}
    return function(layer, state.query, state.key, state.value, mask, **options)[0]


def implementation(name: str, device: torch.device) -> str:
    """What `attn_implementation` asks for: on a GPU the kernels of a mechanism, elsewhere "sdpa"."""
    return f"crosshead_{name}_triton" if device.type == "cuda" else "sdpa"
