"""Accelerate uses its FSDP plugin on GPUs and the like only. This lets it use the plugin on CPUs too: it does
what ``AcceleratorState`` does for them, and nothing else. All that follows is Accelerate's own."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def let_cpus_shard():
    """For the rest of this process."""
    make = AcceleratorState.__init__

    def with_plugin(self, mixed_precision=None, *args, fsdp_plugin=None, **options):
        make(self, mixed_precision, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = with_plugin
