# Written by packaging/stubs.py from the table in __init__.py; a test compares them.
from hf_zero import errors as errors
from hf_zero import optim as optim
from hf_zero import utils as utils
from hf_zero import zero as zero
from hf_zero.comm.bootstrap import init_distributed as init_distributed
from hf_zero.deepspeed import install_as_deepspeed as install_as_deepspeed
from hf_zero.deepspeed.engine import Engine as Engine
from hf_zero.integrations.accelerate_plugin import DummyOptim as DummyOptim
from hf_zero.integrations.accelerate_plugin import DummyScheduler as DummyScheduler
from hf_zero.integrations.accelerate_plugin import ZeroPlugin as ZeroPlugin
from hf_zero.integrations.attach import initialize as initialize
from hf_zero.integrations.averages import AveragedWeightsCallback as AveragedWeightsCallback
from hf_zero.integrations.lightning import FabricZeroStrategy as FabricZeroStrategy
from hf_zero.integrations.lightning import ZeroStrategy as ZeroStrategy
from hf_zero.integrations.training_arguments import ZeroTrainingArguments as ZeroTrainingArguments

__version__: str
__all__ = [
    "__version__",
    "initialize",
    "Engine",
    "init_distributed",
    "install_as_deepspeed",
    "ZeroPlugin",
    "ZeroTrainingArguments",
    "DummyOptim",
    "DummyScheduler",
    "ZeroStrategy",
    "FabricZeroStrategy",
    "AveragedWeightsCallback",
    "zero",
    "utils",
    "errors",
    "optim",
]
