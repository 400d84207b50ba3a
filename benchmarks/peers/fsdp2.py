"""The workload in PyTorch's FSDP2: one unit per block and one for the rest, fused AdamW. Started like benchmarks/throughput:

    scripts/launch -n 2 .venv/bin/python benchmarks/peers/fsdp2.py --strategy SHARD_GRAD_OP
"""

import workload
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

options = workload.flags(__doc__, ["FULL_SHARD", "SHARD_GRAD_OP"])


def wrap(model):
    import torch

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    reshard = options.strategy == "FULL_SHARD"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)  # the root's are needed again first in backward


workload.run(options, "torch-fsdp2", wrap)
