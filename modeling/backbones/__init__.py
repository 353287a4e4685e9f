"""The backbones, one file per architecture: the stock classes with mechanisms, and architecture-specific code."""

# ruff: noqa: F403
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

# Set through globals(), because type checkers export nothing if they see a computed `__all__`.
globals()["__all__"] = [name for name in globals() if name.startswith("Crosshead")]
