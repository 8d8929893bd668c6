# Written by packaging/stubs.py from the table in __init__.py; a test compares them.
from hf_zero.integrations.accelerate_plugin import DummyOptim as DummyOptim
from hf_zero.integrations.accelerate_plugin import DummyScheduler as DummyScheduler
from hf_zero.integrations.accelerate_plugin import ZeroPlugin as ZeroPlugin
from hf_zero.integrations.averages import AveragedWeightsCallback as AveragedWeightsCallback
from hf_zero.integrations.lightning import FabricZeroStrategy as FabricZeroStrategy
from hf_zero.integrations.lightning import ZeroStrategy as ZeroStrategy

__all__ = [
    "ZeroPlugin",
    "DummyOptim",
    "DummyScheduler",
    "ZeroStrategy",
    "FabricZeroStrategy",
    "AveragedWeightsCallback",
]
