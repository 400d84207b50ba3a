"""The workload of ../workload.h and ../gpt.h in Python, and what the peers share: flags, the loop over steps, the report."""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed
from torch import nn
from torch.nn import functional as F


def scatter(numbers, seed):
    mask = 0xFFFFFFFF
    start = 2166136261
    for c in seed.encode():
        start = ((start ^ c) * 16777619) & mask
    x = (numbers + start) & mask
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = (x * factor) & mask
        x = x ^ (x >> 15)
    return x


@torch.no_grad()
def set_initial_values(model):
    for name, value in model.named_parameters():
        if value.dim() >= 2:
            bits = scatter(torch.arange(value.numel()), name) >> 8
            bound = 1 / value.size(-1) ** 0.5
            value.copy_(((bits.float() / (1 << 24) - 0.5) * (2 * bound)).view(value.shape))
        else:
            value.fill_(1 if "norm" in name and name.endswith(".weight") else 0)


def batch_of(step, rank, world_size, o):
    rows = torch.arange(o.batch) + (step * world_size + rank) * o.batch
    start, stride = scatter(rows, "from") % o.vocabulary, scatter(rows, "stride") % 8 + 1
    tokens = (start[:, None] + stride[:, None] * torch.arange(o.sequence + 1)) % o.vocabulary
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.heads = o.heads
        self.norm1 = nn.LayerNorm(o.width)
        self.qkv = nn.Linear(o.width, 3 * o.width)
        self.proj = nn.Linear(o.width, o.width)
        self.norm2 = nn.LayerNorm(o.width)
        self.up = nn.Linear(o.width, 4 * o.width)
        self.down = nn.Linear(4 * o.width, o.width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.token = nn.Embedding(o.vocabulary, o.width)
        self.position = nn.Embedding(o.sequence, o.width)
        self.blocks = nn.ModuleList(Block(o) for _ in range(o.depth))
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, o.vocabulary, bias=False)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def flags(description, strategies):
    parser = argparse.ArgumentParser(description=description)
    for name, value, text in (
        ("width", 256, "size of an embedding"),
        ("depth", 4, "blocks"),
        ("heads", 4, "attention heads"),
        ("batch", 4, "rows per rank and step"),
        ("sequence", 128, "tokens in a row"),
        ("vocabulary", 512, "different tokens"),
        ("steps", 30, "steps to time"),
        ("warmup", 5, "steps before them"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (%(default)s)")
    parser.add_argument("--strategy", choices=strategies, default=strategies[0])
    return parser.parse_args()


def seconds_since_start():
    """Since this process was started, as the kernel noted it."""
    with open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_resident_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / 1e6


def run(o, system, wrap):
    """`wrap` gets the model with its initial values and returns what is trained. All ranks print nothing but rank 0's report."""
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = Gpt(o)
    set_initial_values(model)
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    startup = seconds_since_start()

    losses, times = [], []
    for step in range(o.warmup + o.steps):
        if step == o.warmup:
            processor = time.process_time()
        started = time.perf_counter()
        ids, target = batch_of(step, rank, world_size, o)
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step >= o.warmup:
            times.append(1000 * (time.perf_counter() - started))
    processor = 1000 * (time.process_time() - processor) / o.steps  # all threads

    own = {"losses": losses, "peak_rss_mb": peak_resident_mb(), "startup_s": startup}
    every = [None] * world_size
    torch.distributed.all_gather_object(every, own)
    if rank == 0:
        middle = statistics.median(times)
        report = {
            "system": system,
            "strategy": o.strategy,
            "backend": "gloo",
            "world_size": world_size,
            "step_ms": middle,
            "step_processor_ms": processor,
            "tokens_per_s": world_size * o.batch * o.sequence / middle * 1000,
            "peak_rss_mb": max(each["peak_rss_mb"] for each in every),
            "startup_s": max(each["startup_s"] for each in every),
            "losses": [statistics.fmean(column) for column in zip(*(each["losses"] for each in every))],
            "step_times_ms": times,
        }
        print(f"{system} {o.strategy}: {middle:.1f} ms a step, loss {report['losses'][-1]:.4f}")
        print(json.dumps(report), flush=True)
    torch.distributed.barrier()  # nobody's connections end before everybody has reported
    sys.stdout.flush()
    os._exit(0)  # taking DDP's group down in order aborts one run in six ("terminate called without an active exception")
