"""The text about each mechanism on a card, and the paper to cite."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Mechanism:
    """The description of a mechanism on a card."""

    title: str
    does: str
    """Effect of the mechanism, in one sentence."""
    limits: str
    """Costs and limitations of the mechanism, in one or two sentences."""
    key: str
    """BibTeX key of the paper."""
    paper: str
    """Title of the paper."""
    authors: str
    """Authors as BibTeX separates them, by `and`."""
    year: str
    arxiv: str = ""
    """arXiv id of the paper, without version."""
    url: str = ""
    """Address of a paper that is not on arXiv."""

    @property
    def citation(self) -> str:
        """The BibTeX entry of the paper."""
        fields = {"title": self.paper, "author": self.authors, "year": self.year}
        fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv"} if self.arxiv else {"url": self.url}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])


TALKING = Mechanism(
    title="Talking-Heads Attention",
    does="Linear maps across heads are applied to the attention logits and to the attention weights.",
    limits="It needs the attention weights, which fused attention kernels do not return, so it is slower than "
    "stock attention. The KV cache grows only with `dynamic` maps of keys.",
    key="shazeer2020talking",
    paper="Talking-Heads Attention",
    authors="Shazeer, Noam and Lan, Zhenzhong and Cheng, Youlong and Ding, Nan and Hou, Le",
    year="2020",
    arxiv="2003.02436",
)
MECHANISMS: Mapping[str, Mechanism] = {
    "knocking": Mechanism(
        title="Knocking-Heads Attention (KHA)",
        does="One map, shared by all heads, is applied to the projected values, queries or keys of each head.",
        limits="The map adds computation for every token, in training and, unless it is linear, in inference. The "
        "size of the KV cache does not change.",
        key="zhou2025knocking",
        paper="Knocking-Heads Attention",
        authors="Zhou, Zhanchao and Chen, Xiaodong and Chen, Haoxing and Lan, Zhenzhong and Li, Jianguo",
        year="2025",
        arxiv="2510.23052",
    ),
    "explicit": Mechanism(
        title="Multi-head Explicit Attention (MEA)",
        does="Keys and values are linear combinations of component heads; the cache holds the component heads.",
        limits="With fewer component heads than heads, a conversion is an approximation and needs training. A smaller "
        "cache needs more computation for each decoded token: see the table of costs.",
        key="peng2026explicit",
        paper="Explicit Multi-head Attention for Inter-head Interaction in Large Language Models",
        authors="Peng, Runyu and Zhou, Yunhua and Song, Demin and Lv, Kai and Wang, Bo and Guo, Qipeng and "
        "Qiu, Xipeng",
        year="2026",
        arxiv="2601.19611",
    ),
    "mixture": Mechanism(
        title="Mixture-of-Head attention (MoH)",
        does="A router selects the active heads of each token, and their weights.",
        limits="The size of the KV cache does not change. Whether fewer active heads save time depends on the "
        "hardware and the sequence length, and was not measured here.",
        key="jin2024moh",
        paper="{MoH}: Multi-Head Attention as Mixture-of-Head Attention",
        authors="Jin, Peng and Zhu, Bo and Yuan, Li and Yan, Shuicheng",
        year="2024",
        arxiv="2410.11842",
    ),
    "talking": TALKING,
    "differential": Mechanism(
        title="Differential attention",
        does="Heads form pairs; the softmax of the second head is subtracted from that of the first.",
        limits="Version 1 without `half_values` has no neutral initialisation: a converted model differs from its "
        "source until it is trained. With `half_values` the KV cache grows by half.",
        key="ye2024differential",
        paper="Differential Transformer",
        authors="Ye, Tianzhu and Dong, Li and Xia, Yuqing and Sun, Yutao and Zhu, Yi and Huang, Gao and Wei, Furu",
        year="2024",
        arxiv="2410.05258",
    ),
    "gating": Mechanism(
        title="Headwise gated attention",
        does="The output of each head is multiplied by a gate, which is computed from the layer's input.",
        limits="The gates add a little computation for every token. The size of the KV cache does not change.",
        key="qiu2025gated",
        paper="Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
        authors="Qiu, Zihan and Wang, Zekun and Zheng, Bo and Huang, Zeyu and Wen, Kaiyue and Yang, Songlin and "
        "Men, Rui and Yu, Le and Huang, Fei and Huang, Suozhi and Liu, Dayiheng and Zhou, Jingren and Lin, Junyang",
        year="2025",
        arxiv="2505.06708",
    ),
    "bilinear": replace(
        TALKING,
        title="General bilinear multi-head attention",
        does="Each head has a full matrix between queries and keys, and one from values to the output.",
        limits="It has many times the parameters and multiplications of multi-head attention.",
    ),
}
"""Name of a mechanism in `mixers` of a config -> its description."""
DIFFERENTIAL_2 = Mechanism(
    title="Differential attention, version 2",
    does="Query heads form pairs; the output of the second head, times a factor for each token, is subtracted from "
    "that of the first.",
    limits="It has twice the query heads of a model without it. The size of the KV cache does not change.",
    key="ye2026differential",
    paper="Differential Transformer {V2}",
    authors="Ye, Tianzhu and Dong, Li and Sun, Yutao and Wei, Furu",
    year="2026",
    url="https://huggingface.co/blog/microsoft/diff-attn-v2",
)


def described(mixers: Mapping[str, Any]) -> dict[str, Mechanism]:
    """Name -> description of the mechanisms in `mixers`; mechanisms without a description are left out."""
    descriptions = {name: MECHANISMS[name] for name in mixers if name in MECHANISMS}
    if mixers.get("differential", {}).get("version") == 2:
        descriptions["differential"] = DIFFERENTIAL_2
    return descriptions
