"""Let Accelerate use FSDP on CPUs: it reads its FSDP plugin on accelerators only. Import this before an Accelerator."""

from accelerate import state
from accelerate.utils import DistributedType

original = state.AcceleratorState.__init__


def with_fsdp(self, *arguments, fsdp_plugin=None, **options) -> None:
    original(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
    if self.__dict__.get("fsdp_plugin") is not None:  # each new object resets the type
        self.distributed_type = DistributedType.FSDP


state.AcceleratorState.__init__ = with_fsdp
