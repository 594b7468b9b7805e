"""A small network, its loss on numbered batches, and a training loop with spikes."""

import torch
from torch import nn

from zclip_ext import ZClipOptimizer


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(net, seed, scale=1.0):
    batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    return scale * net(batch).square().mean()


def train(net, optimizer, steps, spikes=()):
    for index in steps:
        optimizer.zero_grad()
        loss_of(net, index, 30.0 if index in spikes else 1.0).backward()
        optimizer.step()


def adamw(net, **options):
    return ZClipOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), **options)


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
