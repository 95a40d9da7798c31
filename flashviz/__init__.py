"""flashviz: step through attention kernels and see how they move data.

Every picture is what an algorithm did: a recording of real tiles, never a drawing. ``import flashviz`` loads NumPy at
most; matplotlib, ipywidgets and CuPy are imported by the functions that need them.

>>> import numpy as np, flashviz as fv
>>> x = np.eye(4, dtype="float32")
>>> run = fv.flash_attention_2(x, x, x, Br=2, Bc=2, device="numpy")
>>> len(run.recording.steps)
19
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Block": "slots",
    "Slot": "slots",
    "Values": "slots",
    "Recording": "recording",
    "Recorder": "recorder",
    "online_softmax": "programs.online_softmax",
    "OnlineSoftmax": "programs.online_softmax",
    "SoftmaxRun": "programs.online_softmax",
    "flash_attention_1": "programs.flash_attention_1",
    "FlashAttention1": "programs.flash_attention_1",
    "flash_attention_2": "programs.flash_attention_2",
    "FlashAttention2": "programs.flash_attention_2",
    "FlashAttention2Registers": "programs.flash_attention_2_registers",
    "FlashAttention2Ahead": "programs.flash_attention_2_ahead",
    "flash_attention_3": "programs.flash_attention_3",
    "FlashAttention3": "programs.flash_attention_3",
    "ring": "programs.ring",
    "Ring": "programs.ring",
    "flash_attention_2_rope": "programs.flash_attention_2_rope",
    "FlashAttention2Rope": "programs.flash_attention_2_rope",
    "flash_decoding": "programs.flash_decoding",
    "FlashDecoding": "programs.flash_decoding",
    "standard_attention": "programs.standard_attention",
    "StandardAttention": "programs.standard_attention",
    "rope": "programs.rope",
    "rope_pairs": "programs.rope",
    "rope_tables": "programs.angles",
    "Rope": "programs.rope",
    "RopeRun": "programs.rope",
    "Run": "programs.base",
    "Program": "programs.base",
    "action": "programs.base",
    "DeviceError": "programs.device",
    "traffic": "checks.traffic",
    "traffic_model": "checks.model",
    "check_traffic": "checks.model",
    "same": "checks.same",
    "stored": "programs.stored",
    "check": "checks.kernels",
    "load": "files",
    "Sight": "sight",
    "measured": "measurements",
    "save": "view.export",
    "page": "view.page",
    "scene": "view.scene",
    "storyboard": "view.storyboard",
    "timeline": "view.timeline",
    "turns": "view.turns",
    "frame": "view.storyboard",
    "play": "player",
    "explore": "explorer",
    "compare": "comparison",
    "traffic_plot": "view.traffic",
    "mask_plot": "view.masks",
    "autotune": "tuning",
    "autotune_plot": "view.tuning",
    "bench": "benchmark",
    "ladder_plot": "view.ladder",
    "fragments": "view.fragments",
    "banks": "view.banks",
    "swizzle": "view.swizzle",
    "code_diff": "view.diff",
    "fragment": "warp",
    "wavefronts": "warp",
    "doctor": "doctor",
    "to_bfloat16": "bfloat16",
    "from_bfloat16": "bfloat16",
}

__all__ = ["__version__", *sorted(_WHERE)]

if TYPE_CHECKING:
    from flashviz.benchmark import bench as bench
    from flashviz.bfloat16 import from_bfloat16 as from_bfloat16
    from flashviz.bfloat16 import to_bfloat16 as to_bfloat16
    from flashviz.checks.kernels import check as check
    from flashviz.checks.model import check_traffic as check_traffic
    from flashviz.checks.model import traffic_model as traffic_model
    from flashviz.checks.same import same as same
    from flashviz.checks.traffic import traffic as traffic
    from flashviz.comparison import compare as compare
    from flashviz.doctor import doctor as doctor
    from flashviz.explorer import explore as explore
    from flashviz.files import load as load
    from flashviz.measurements import measured as measured
    from flashviz.player import play as play
    from flashviz.programs.angles import rope_tables as rope_tables
    from flashviz.programs.base import Program as Program
    from flashviz.programs.base import Run as Run
    from flashviz.programs.base import action as action
    from flashviz.programs.device import DeviceError as DeviceError
    from flashviz.programs.flash_attention_1 import FlashAttention1 as FlashAttention1
    from flashviz.programs.flash_attention_1 import flash_attention_1 as flash_attention_1
    from flashviz.programs.flash_attention_2 import FlashAttention2 as FlashAttention2
    from flashviz.programs.flash_attention_2 import flash_attention_2 as flash_attention_2
    from flashviz.programs.flash_attention_2_ahead import FlashAttention2Ahead as FlashAttention2Ahead
    from flashviz.programs.flash_attention_2_registers import FlashAttention2Registers as FlashAttention2Registers
    from flashviz.programs.flash_attention_2_rope import FlashAttention2Rope as FlashAttention2Rope
    from flashviz.programs.flash_attention_2_rope import flash_attention_2_rope as flash_attention_2_rope
    from flashviz.programs.flash_attention_3 import FlashAttention3 as FlashAttention3
    from flashviz.programs.flash_attention_3 import flash_attention_3 as flash_attention_3
    from flashviz.programs.flash_decoding import FlashDecoding as FlashDecoding
    from flashviz.programs.flash_decoding import flash_decoding as flash_decoding
    from flashviz.programs.online_softmax import OnlineSoftmax as OnlineSoftmax
    from flashviz.programs.online_softmax import SoftmaxRun as SoftmaxRun
    from flashviz.programs.online_softmax import online_softmax as online_softmax
    from flashviz.programs.ring import Ring as Ring
    from flashviz.programs.ring import ring as ring
    from flashviz.programs.rope import Rope as Rope
    from flashviz.programs.rope import RopeRun as RopeRun
    from flashviz.programs.rope import rope as rope
    from flashviz.programs.rope import rope_pairs as rope_pairs
    from flashviz.programs.standard_attention import StandardAttention as StandardAttention
    from flashviz.programs.standard_attention import standard_attention as standard_attention
    from flashviz.programs.stored import stored as stored
    from flashviz.recorder import Recorder as Recorder
    from flashviz.recording import Recording as Recording
    from flashviz.sight import Sight as Sight
    from flashviz.slots import Block as Block
    from flashviz.slots import Slot as Slot
    from flashviz.slots import Values as Values
    from flashviz.tuning import autotune as autotune
    from flashviz.view.banks import banks as banks
    from flashviz.view.diff import code_diff as code_diff
    from flashviz.view.export import save as save
    from flashviz.view.fragments import fragments as fragments
    from flashviz.view.ladder import ladder_plot as ladder_plot
    from flashviz.view.masks import mask_plot as mask_plot
    from flashviz.view.page import page as page
    from flashviz.view.scene import scene as scene
    from flashviz.view.storyboard import frame as frame
    from flashviz.view.storyboard import storyboard as storyboard
    from flashviz.view.swizzle import swizzle as swizzle
    from flashviz.view.timeline import timeline as timeline
    from flashviz.view.traffic import traffic_plot as traffic_plot
    from flashviz.view.tuning import autotune_plot as autotune_plot
    from flashviz.view.turns import turns as turns
    from flashviz.warp import fragment as fragment
    from flashviz.warp import wavefronts as wavefronts


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"flashviz has no {name!r}; it has {', '.join(sorted(_WHERE))}")
    value = getattr(importlib.import_module(f"flashviz.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(__all__))
