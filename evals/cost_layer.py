"""What one attention layer costs, as arithmetic on its sizes: no backbone, no tensors.

Multiplications are those of matrix products, as the papers count them: every query meets every key, whatever a causal
mask, a window or a head that is off would let a fast backend skip. Norms, positions, softmax and other work on single
numbers are left out, and so are biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosshead.modeling.mechanisms.base import CallSizes, Mechanism, weight_count


@dataclass(frozen=True)
class AttentionLayer:
    """The sizes of an attention layer, and its mechanisms, which know what they add."""

    hidden_size: int
    query_heads: int
    key_heads: int
    """Heads of the key projection; 0 where keys are the input itself."""
    value_heads: int
    """Heads of the value projection; 0 where values are the input itself."""
    output_heads: int
    """Heads whose weights meet values, and that the output projection reads."""
    key_dim: int
    value_dim: int
    mixers: Sequence[Mechanism] = ()

    def parameters(self) -> int:
        """Weights of the four projections and of the mechanisms."""
        key_side = (self.query_heads + self.key_heads) * self.key_dim
        value_side = (self.value_heads + self.output_heads) * self.value_dim
        return self.hidden_size * (key_side + value_side) + sum(map(weight_count, self.mixers))

    def multiplications(self, queries: int, new_keys: int, keys: int) -> int:
        """Those of one call: `new_keys` tokens become keys and values, and `queries` meet all `keys`."""
        key_side = self.query_heads * queries + self.key_heads * new_keys
        value_side = self.output_heads * queries + self.value_heads * new_keys
        projections = self.hidden_size * (key_side * self.key_dim + value_side * self.value_dim)
        attention = queries * keys * (self.query_heads * self.key_dim + self.output_heads * self.value_dim)
        call = CallSizes(queries, new_keys, keys, self.key_heads, self.value_heads)
        return projections + attention + sum(mixer.multiplications(call) for mixer in self.mixers)

    def cached_numbers(self) -> int:
        """Numbers that the cache keeps of one token."""
        heads = self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return heads + sum(mixer.cached_numbers() for mixer in self.mixers)


def layer_of(attention: Any) -> AttentionLayer:
    """The sizes of a model's attention module, stock or ours."""
    size, hidden = attention.head_dim, attention.q_proj.in_features
    queries, keys, values = (
        projection.out_features // size for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixers = tuple(getattr(attention, "mixers", {}).values())
    return AttentionLayer(hidden, queries, keys, values, queries, size, size, mixers)
