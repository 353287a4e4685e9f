"""The mechanisms: what a card says of each, and the paper to cite."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mechanism:
    """A mechanism, for readers of cards."""

    title: str
    does: str
    """One sentence."""
    limits: str
    key: str
    """Of the paper, in BibTeX."""
    paper: str
    authors: str
    year: str
    arxiv: str

    @property
    def citation(self) -> str:
        """BibTeX."""
        fields = {"title": self.paper, "author": self.authors, "year": self.year, "eprint": self.arxiv}
        lines = [f"  {name} = {{{value}}}," for name, value in (fields | {"archivePrefix": "arXiv"}).items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])


MECHANISMS: Mapping[str, Mechanism] = {
    "knocking": Mechanism(
        title="Knocking-Heads Attention (KHA)",
        does="One map, shared by all heads, acts on each head's projected values, queries or keys.",
        limits="The map costs work for every token, in training and, unless it is linear, in use; the KV cache keeps "
        "its size.",
        key="zhou2025knocking",
        paper="Knocking-Heads Attention",
        authors="Zhou, Zhanchao and Chen, Xiaodong and Chen, Haoxing and Lan, Zhenzhong and Li, Jianguo",
        year="2025",
        arxiv="2510.23052",
    ),
    "explicit": Mechanism(
        title="Multi-head Explicit Attention (MEA)",
        does="Keys and values are combinations of component heads, of which the cache holds no more than there are.",
        limits="With fewer components than heads, a conversion is an approximation that training has to make good; "
        "a smaller cache is paid for with work at each decoded token, which the table of costs counts.",
        key="peng2026explicit",
        paper="Explicit Multi-head Attention for Inter-head Interaction in Large Language Models",
        authors="Peng, Runyu and Zhou, Yunhua and Song, Demin and Lv, Kai and Wang, Bo and Guo, Qipeng and "
        "Qiu, Xipeng",
        year="2026",
        arxiv="2601.19611",
    ),
    "mixture": Mechanism(
        title="Mixture-of-Head attention (MoH)",
        does="A router picks, for each token, which heads count and by how much.",
        limits="The KV cache keeps its size. Whether fewer active heads save time depends on hardware and length, and "
        "was not measured here.",
        key="jin2024moh",
        paper="{MoH}: Multi-Head Attention as Mixture-of-Head Attention",
        authors="Jin, Peng and Zhu, Bo and Yuan, Li and Yan, Shuicheng",
        year="2024",
        arxiv="2410.11842",
    ),
    "talking": Mechanism(
        title="Talking-Heads Attention",
        does="Linear maps across heads act on the attention logits and on the attention weights.",
        limits="It works on the attention weights themselves, which fused attention kernels do not show: expect it to "
        "be slower than stock attention. The KV cache keeps its size.",
        key="shazeer2020talking",
        paper="Talking-Heads Attention",
        authors="Shazeer, Noam and Lan, Zhenzhong and Cheng, Youlong and Ding, Nan and Hou, Le",
        year="2020",
        arxiv="2003.02436",
    ),
    "differential": Mechanism(
        title="Differential attention",
        does="Of two paired heads, the second's softmax is subtracted from the first's.",
        limits="It has no neutral start: a converted model is far from its source until it is trained. The KV cache "
        "keeps its size.",
        key="ye2024differential",
        paper="Differential Transformer",
        authors="Ye, Tianzhu and Dong, Li and Xia, Yuqing and Sun, Yutao and Zhu, Yi and Huang, Gao and Wei, Furu",
        year="2024",
        arxiv="2410.05258",
    ),
    "gating": Mechanism(
        title="Headwise gated attention",
        does="Each head's output is multiplied by a gate that is made of the layer's input.",
        limits="The gates cost a little work for every token, in training and in use; the KV cache keeps its size.",
        key="qiu2025gated",
        paper="Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
        authors="Qiu, Zihan and Wang, Zekun and Zheng, Bo and Huang, Zeyu and Wen, Kaiyue and Yang, Songlin and "
        "Men, Rui and Yu, Le and Huang, Fei and Huang, Suozhi and Liu, Dayiheng and Zhou, Jingren and Lin, Junyang",
        year="2025",
        arxiv="2505.06708",
    ),
}
"""By the name in a config's `mixers`."""
