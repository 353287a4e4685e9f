"""The backbones, one file each: which stock classes it combines, and what is peculiar to it."""

# ruff: noqa: F403
from . import (
    albert,
    bert,
    deepseek_v2,
    deepseek_v3,
    deit,
    dinov2,
    gta,
    llama,
    qwen2,
    qwen3,
    qwen3_moe,
    t5,
    transnext,
    vit,
)
from .albert import *
from .bert import *
from .deepseek_v2 import *
from .deepseek_v3 import *
from .deit import *
from .dinov2 import *
from .gta import *
from .llama import *
from .qwen2 import *
from .qwen3 import *
from .qwen3_moe import *
from .t5 import *
from .transnext import *
from .vit import *

__all__: list[str] = []
__all__ += albert.__all__
__all__ += bert.__all__
__all__ += deepseek_v2.__all__
__all__ += deepseek_v3.__all__
__all__ += deit.__all__
__all__ += dinov2.__all__
__all__ += gta.__all__
__all__ += llama.__all__
__all__ += qwen2.__all__
__all__ += qwen3.__all__
__all__ += qwen3_moe.__all__
__all__ += t5.__all__
__all__ += transnext.__all__
__all__ += vit.__all__
