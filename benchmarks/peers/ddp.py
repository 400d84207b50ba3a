"""The workload in PyTorch's DistributedDataParallel: replicas, gradients averaged in buckets during backward, fused AdamW. Started like
benchmarks/throughput:

    scripts/launch -n 2 .venv/bin/python benchmarks/peers/ddp.py
"""

import workload
from torch.nn.parallel import DistributedDataParallel

options = workload.flags(__doc__, ["NO_SHARD"])
workload.run(options, "torch-ddp", lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))
