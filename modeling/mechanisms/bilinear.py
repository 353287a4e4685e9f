"""General bilinear multi-head attention (GBMA): each head has full matrices instead of low-rank factors.

`L_h = X P_h M^T`, mask, softmax, `Y = sum_h W_h M Q_h`, with queries from `X`, and keys and values from `M`.
`q_proj` holds `P` (each head has as many features as `M`), and `o_proj` holds `Q`. There are no key and value
projections: the inputs `M` are the keys and the values of all heads. The cache holds them twice, as keys and as
values. Multi-head attention is the case `P_h = W_q,h W_k,h^T`, `Q_h = W_v,h W_o,h`; talking-heads sums such products
over heads, weighted by its maps.

Paper: "Talking-Heads Attention", section 6.
"""

from dataclasses import replace

from ..ops import repeat_heads
from ..options import refuse
from .base import AttentionState, HeadLayout, Mechanism, Rules, Settings


class BilinearRules(Rules):
    """Bilinear has no options but `layers`."""

    options = {}

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Refuse layers with RoPE, and all other mechanisms except `mixture` and `gating`."""
        if layout.is_rotary:
            raise refuse(
                "mixers.bilinear", settings, "its keys are the layer's input, which rotary positions would turn"
            )
        for other in layer:
            if other not in ("bilinear", "mixture", "gating"):
                reason = "'bilinear' has no projected keys and values: combine it with 'mixture' or 'gating' alone"
                raise refuse(f"mixers.{other}", layer[other], reason)

    @classmethod
    def reshape(cls, settings: Settings, layout: HeadLayout) -> HeadLayout:
        """Return a layout with one key/value head, which has the features of the layer's input."""
        size = layout.hidden_size
        layout = replace(layout, head_dim=size, value_dim=size, output_dim=size, key_value_heads=1)
        return replace(layout, key_components=1, value_components=1, projects_keys=False)


class Bilinear(Mechanism):
    """Bilinear attention; it has no parameters besides the projections of the layer."""

    rules = BilinearRules

    def after_cache(self, state: AttentionState) -> None:
        """Repeat the inputs as keys and values of every head."""
        heads = state.query.shape[1]
        state.key, state.value = repeat_heads(state.key, heads), repeat_heads(state.value, heads)
