"""What each rank does in a case, and returns for the test to judge. The names of cases are those of these functions."""

import contextlib
import math
import warnings

import layouts
import torch
import torch.distributed as dist
from common import backward, bits, error_of, layout_of, norm_of, reference_gradients
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import zclip_ext
from zclip_ext import ZClip, ZClipOptimizer

CAP = 0.05


def norm(name, *arguments):
    """Norm and clipped gradients of a layout against the unsharded model's; placements, strides and dtypes."""
    layout = layout_of(name, *arguments)
    backward(layout, 0)
    # In mixed precision the gradient is another one: what counts is that of this very model, put together.
    own = {key: value.clone() for key, value in layout.gradients().items()} if "bf16" in arguments else None
    shape_before = [describe(p.grad) for p in layout.parameters()]
    zclip = ZClip(max_grad_norm=CAP, shared_by=layout.shared_by)
    with CommDebugMode() as communication:
        result = zclip.clip(layout.parameters(), layout.module)
    first_step = communication.get_total_counts()
    expected = own or reference_gradients(0)
    wanted = norm_of(expected.values())
    ours = layout.gradients()
    worst = 0.0
    for key, gradient in expected.items():
        clipped = gradient * (CAP / wanted)
        worst = max(worst, ((ours[key].float().view_as(clipped) - clipped).abs().max() / clipped.abs().max()).item())
    zclip.clip(layout.parameters(), layout.module)  # layouts are compared at the first two calls
    with CommDebugMode() as communication:
        zclip.clip(layout.parameters(), layout.module)
    zclip.check_consistency()
    return {
        "norm": float(result),
        "bits": float(result).hex(),
        "wanted": wanted,
        "worst": worst,
        "same_shape": shape_before == [describe(p.grad) for p in layout.parameters()],
        "collectives": communication.get_total_counts(),
        "first_step": first_step,
        "state": bits(zclip),
    }


def describe(grad):
    if grad is None:
        return None
    placements = str(getattr(grad, "placements", "plain")).replace("Partial(sum)", "Replicate()")
    return [placements, list(grad.stride()), str(grad.dtype), list(grad.shape)]


def one_sample_each(name, steps=3):
    """The norm stream of a layout over some steps of SGD, for comparison between world sizes."""
    layout = layout_of(name)
    optimizer = ZClipOptimizer(torch.optim.SGD(layout.parameters(), lr=0.1), model=layout.module)
    norms = []
    for step in range(int(steps)):
        optimizer.zero_grad()
        backward(layout, step)
        optimizer.step()
        norms.append(float(optimizer.zclip.last))
    return norms


def torch_clip(name, *arguments):
    """What torch's own functions say of the same gradients: "right", "wrong" or the kind of error."""
    layout = layout_of(name, *arguments)
    backward(layout, 0)
    wanted = norm_of(reference_gradients(0).values())

    def verdict(clip):
        try:
            total = layouts.full(clip())
        except Exception as error:
            return f"raises {type(error).__name__}"
        return "right" if abs(float(total) / wanted - 1) < 1e-4 else "wrong"

    result = {"clip_grad_norm_": verdict(lambda: nn.utils.clip_grad_norm_(layout.parameters(), 1e9))}
    if hasattr(layout.model, "clip_grad_norm_"):
        result["FSDP1's own"] = verdict(lambda: layout.model.clip_grad_norm_(1e9))
    return result


def bad_gradient_on_one_rank(value):
    """inf or NaN on the last rank alone: everyone skips, everyone goes on."""
    net = layouts.ddp().model
    optimizer = ZClipOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    before = [p.detach().clone() for p in net.parameters()]
    layouts.loss_of(net, layouts.my_part(layouts.whole_batch(0))).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        next(net.parameters()).grad.view(-1)[0] = float(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    skipped = optimizer.last_step_skipped
    unchanged = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    optimizer.zero_grad()
    layouts.loss_of(net, layouts.my_part(layouts.whole_batch(1))).backward()
    optimizer.step()
    optimizer.zclip.check_consistency()
    metrics = optimizer.zclip.metrics()
    return {
        "skipped": skipped,
        "unchanged": unchanged,
        "counts": [metrics[name] for name in ("steps", "samples", "nonfinite", "skipped")],
        "next_step_ran": not optimizer.last_step_skipped,
    }


def raise_on_all():
    """on_nonfinite="raise" with the bad element on one rank."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, math.nan if dist.get_rank() == 0 else 1.0])
    try:
        ZClip(on_nonfinite="raise").step([p])
    except zclip_ext.NonFiniteGradientError:
        return "raised"
    return "did not raise"


def p57():
    """Local norms 3 and 4 of a Shard(0) gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.tensor([[3.0, 4.0][dist.get_rank()]])
    p = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    p.grad = DTensor.from_local(local, mesh, [Shard(0)])
    zclip = ZClip(max_grad_norm=1.0)
    result = zclip.step([p])
    return [float(result), p.grad.to_local().item(), bits(zclip)]


def p58():
    """Tiny norms: nothing is added to a rank's part before the sum."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    p.grad = DTensor.from_local(torch.tensor([1e-6]), mesh, [Shard(0)])
    return float(ZClip().step([p]))


def p60():
    """2 replicas of 2 shards with local norms 3, 4, 3, 4."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    p = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, placements, run_check=False))
    local = torch.tensor([[3.0, 4.0][dist.get_rank() % 2]])
    p.grad = DTensor.from_local(local, mesh, placements, run_check=False)
    return float(ZClip().step([p]))


def p61():
    """An expert on each rank, squares 20 and 100, and a dense parameter that both hold."""
    rank = dist.get_rank()
    expert, dense = nn.Parameter(torch.full((1,), float(rank))), nn.Parameter(torch.zeros(1))
    expert.grad = torch.tensor([math.sqrt([20.0, 100.0][rank])])
    dense.grad = torch.tensor([0.0])
    zclip = ZClip(shared_by=lambda p: None if p is expert else dist.group.WORLD)
    total = float(zclip.step([expert, dense]))
    expert.grad = expert.grad.clone()
    dense.grad = torch.tensor([2.0])
    capped = ZClip(max_grad_norm=1.0, shared_by=lambda p: None if p is expert else dist.group.WORLD)
    capped.step([expert, dense])
    return [total, dense.grad.item().hex()]


def p62():
    """Two stages with norms 3 and 4; two chunks on a rank; a tied copy with norm 20 on both."""
    rank = dist.get_rank()
    alone = nn.Parameter(torch.full((1,), float(rank)))
    alone.grad = torch.tensor([[3.0, 4.0][rank]])
    stages = float(ZClip(shared_by=lambda p: None).step([alone]))
    chunks = [nn.Parameter(torch.full((1,), float(2 * rank + i))) for i in range(2)]
    for chunk, value in zip(chunks, [[1.0, 2.0], [2.0, 4.0]][rank], strict=True):
        chunk.grad = torch.tensor([value])
    zclip = ZClip(shared_by=lambda p: None)
    both = float(zclip.step(chunks))
    tied = nn.Parameter(torch.ones(1))
    tied.grad = torch.tensor([20.0])
    shared = float(ZClip().step([tied]))
    return [stages, both, zclip.metrics()["samples"], shared]


def p63():
    return norm("mixed")["norm"]


def p64():
    """The last rank has no gradient at all."""
    p = nn.Parameter(torch.zeros(2))
    if dist.get_rank() == 0:
        p.grad = torch.tensor([3.0, 4.0])
    zclip = ZClip(shared_by=lambda p: None)
    norms, collectives = [float(zclip.step([p])), float(zclip.clip([p]))], []
    for _ in range(2):
        with CommDebugMode() as communication:
            norms.append(float(zclip.clip([p])))
        collectives.append(communication.get_total_counts())
    return [norms, collectives]


def p66():
    """A group whose backend can't reduce what lies on the CPU is met on its own device."""
    from zclip_ext import distributed

    class Module:
        current_device = staticmethod(lambda: 3)
        is_available = staticmethod(lambda: True)

    real = dist.get_backend_config, torch.get_device_module
    places = []
    try:
        torch.get_device_module = lambda device: Module
        for config in ("cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"):
            dist.get_backend_config = lambda group=None, config=config: config
            places.append(str(distributed._meeting_place(None)))
    finally:
        dist.get_backend_config, torch.get_device_module = real
    return places


def p67(use_orig_params):
    """A subset of an FSDP1 model's parameters: their global norm with the module, an error without."""
    layout = layouts.fsdp1("FULL_SHARD", use_orig_params)
    backward(layout, 0)
    subset = list(layout.model._fsdp_wrapped_module.blocks[0].parameters())
    result = float(ZClip().clip(subset, layout.model))
    wanted = norm_of(g for name, g in reference_gradients(0).items() if name.startswith("blocks.0"))
    try:
        ZClip().step(subset)
        error = "none"
    except RuntimeError as problem:
        error = str(problem)
    return [result, wanted, error]


def p69():
    """Gradients that DDP has not averaged, and then ones that it has."""
    net = layouts.ddp().model
    zclip, seen = ZClip(), []
    for averaged in (True, False, False):
        net.zero_grad()
        with contextlib.nullcontext() if averaged else net.no_sync(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layouts.loss_of(net, layouts.my_part(layouts.whole_batch(0))).backward()
            zclip.clip(list(net.parameters()))
        seen.append([str(w.message) for w in caught if w.category is zclip_ext.ZClipWarning])
    return seen


def undeclared_stages():
    """Plain parameters that differ by rank, and nobody said so."""
    p = nn.Parameter(torch.full((1,), float(dist.get_rank())))
    p.grad = torch.tensor([1.0])
    return error_of(lambda: ZClip().step([p]))


def wrongly_declared():
    """Replicas of (0, 1) and (2, 3) are declared, but the ranks of a pair differ."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = nn.Parameter(torch.full((1,), float(dist.get_rank() % 2)))
    p.grad = torch.tensor([1.0])
    return error_of(lambda: ZClip(shared_by=pairs[dist.get_rank() // 2]).step([p]))


def stages_with_replicas():
    """Two stages of two replicas each, as a pipeline with data parallel has."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = nn.Parameter(torch.full((1,), float(rank // 2)))
    p.grad = torch.tensor([[3.0, 4.0][rank // 2]])
    return float(ZClip(shared_by=pairs[rank // 2]).step([p]))


def same_seed_experts():
    """Experts that start alike on all ranks, undeclared: found when they have moved."""
    p = nn.Parameter(torch.ones(4))
    optimizer = ZClipOptimizer(torch.optim.SGD([p], lr=0.1))
    errors = []
    for _ in range(2):
        p.grad = torch.full((4,), float(dist.get_rank() + 1))
        errors.append(error_of(optimizer.step))
    return errors


def shards_outside_of_shared_by():
    """FSDP2 splits a parameter over all ranks, and shared_by says that each rank alone holds it."""
    layout = layouts.fsdp2()
    backward(layout, 0)
    zclip = ZClip(shared_by=lambda p: None)
    return [error_of(lambda: zclip.clip(layout.parameters())) for _ in range(4)]


def values_that_cannot_be_read():
    """A frozen quantised weight beside the trained ones."""
    frozen = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([3.0, 4.0])
    return float(ZClip().step([frozen, p]))


def weights_with_nan(where):
    """NaN in a weight, on all ranks or on one; the ranks hold the same elsewhere, or don't."""
    p = nn.Parameter(torch.ones(3) + (dist.get_rank() if where == "differ" else 0))
    if where != "one" or dist.get_rank() == 0:
        p.data[0] = math.nan
    p.grad = torch.tensor([3.0, 4.0, 0.0])
    return error_of(lambda: ZClip().step([p]))


def a_list_that_differs_by_rank():
    """Parameters without a gradient left out of the list, on one rank, at a call that compares nothing."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    zclip, norms = ZClip(), []
    for call in range(4):
        first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
        parameters = [first] if call == 3 and dist.get_rank() == 1 else [first, second]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            norms.append(float(zclip.clip(parameters)))
    return norms


def declared_on_one_rank():
    p = nn.Parameter(torch.full((1,), float(dist.get_rank())))
    p.grad = torch.tensor([1.0])
    shared_by = (lambda p: None) if dist.get_rank() == 1 else None
    return error_of(lambda: ZClip(shared_by=shared_by).step([p]))


def a_rank_without_parameters():
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.tensor([1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return error_of(lambda: ZClip().step([p] if dist.get_rank() == 0 else []))


def one_stage_wrong():
    """Four ranks, two stages; the second stage's replicas differ: an error on the first stage's ranks, too."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = nn.Parameter(torch.full((1,), float(rank) if rank >= 2 else 0.0))
    p.grad = torch.tensor([1.0])
    return error_of(lambda: ZClip(shared_by=pairs[rank // 2]).step([p]))


def pickled():
    import pickle

    whole = pickle.loads(pickle.dumps(ZClip()))
    return [repr(whole), error_of(lambda: pickle.dumps(ZClip(group=dist.group.WORLD)), TypeError)]


def training_apart():
    """Ranks that train models of their own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    p = nn.Parameter(torch.full((1,), float(dist.get_rank())))
    p.grad = torch.tensor([float(dist.get_rank() + 1)])
    return float(ZClip(group=groups[dist.get_rank()]).step([p]))


def inconsistent():
    """One rank saw another norm: found and named on all."""
    zclip = ZClip()
    zclip.check_consistency()
    numbers = zclip.state_dict()
    if dist.get_rank() == 1:
        numbers["warmup_mean"] = 0.5
    zclip.load_state_dict(numbers)
    return error_of(zclip.check_consistency)


def pipeline():
    """torch.distributed.pipelining over two stages: one norm of the whole model, clipped alike."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, net = dist.get_rank(), layouts.Net()
    stage = net.blocks[0] if rank == 0 else nn.Sequential(net.blocks[1], net.head)
    batch = layouts.whole_batch(0)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu")),
        n_microbatches=2,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=torch.zeros(8, 4, 1), losses=[])
    optimizer = ZClipOptimizer(torch.optim.SGD(stage.parameters(), lr=0.1), shared_by=lambda p: None, max_grad_norm=CAP)
    optimizer.step()
    optimizer.zclip.check_consistency()
    wanted = reference_gradients(0)
    return [float(optimizer.zclip.last), norm_of(wanted.values())]


def one_rank_dies():
    """Rank 1 ends; the others must get an error from their process group, not wait for ever."""
    import os

    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.tensor([1.0])
    zclip = ZClip()
    zclip.clip([p])
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        zclip.clip([p])
    except RuntimeError as error:
        return f"error as it should be: {type(error).__name__}"
    return "no error"
