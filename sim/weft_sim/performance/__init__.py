# pyright: reportUnusedImport=false
"""How long an iteration takes: models of devices and engines, fitted to profiles and to published measurements.

Tests take these names from here: the modules behind them may change. `models` and `roofline` are imported by their
modules: they need numpy, which a plan's scenario does without.
"""

from weft_sim.performance.accelerator import ACCELERATORS, UnknownHardware, accelerator
from weft_sim.performance.architecture import ARCHITECTURES, BadArchitecture, architecture
from weft_sim.performance.splitwise_table import interpolated, published, read
from weft_sim.performance.step import StepShape
