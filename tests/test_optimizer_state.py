"""The state of a ZClipOptimizer: pickle, checkpoints of all kinds, resumed runs."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from networks import adamw, assert_same, model, train, weights
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zclip_ext


def test_p29_pickle_and_deepcopy():
    for duplicate in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        net = model()
        optimizer = adamw(net, warmup_steps=10)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # patches step on the instance
        train(net, optimizer, range(15))
        other_net, other = duplicate((net, optimizer))
        assert other.zclip.state_dict() == optimizer.zclip.state_dict()
        for pair in ((net, optimizer), (other_net, other)):
            train(*pair, range(15, 25), spikes={18})
        assert_same(weights(net), weights(other_net))
        assert other.zclip.state_dict() == optimizer.zclip.state_dict()


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("at", [1, 13, 24, 25, 26, 37])
@pytest.mark.parametrize("options", [{}, {"robust_warmup": True, "log_space": True}])
def test_a_resumed_run_is_the_uninterrupted_run(at, options):
    whole = model()
    optimizer = adamw(whole, **options)
    train(whole, optimizer, range(60), spikes={10, 36, 37, 50})

    first = model()
    first_optimizer = adamw(first, **options)
    train(first, first_optimizer, range(at), spikes={10, 36, 37, 50})
    state = saved_and_loaded({"model": first.state_dict(), "optimizer": first_optimizer.state_dict()})
    second = model(seed=1)
    resumed = adamw(second, **options)
    second.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(second, resumed, range(at, 60), spikes={10, 36, 37, 50})
    assert_same(weights(whole), weights(second))
    assert resumed.zclip.state_dict() == optimizer.zclip.state_dict()
    assert resumed.zclip.metrics() == optimizer.zclip.metrics()


def test_p30_states_are_plain_numbers_in_the_first_group():
    net = model()
    optimizer = adamw(net)
    train(net, optimizer, range(30))
    group = optimizer.state_dict()["param_groups"][0]
    numbers = {key: value for key, value in group.items() if key.startswith("zclip_")}
    assert all(type(value) in (int, float) for value in numbers.values())
    assert numbers["zclip_samples"] == 30


def test_p30_an_inner_state_starts_fresh_statistics():
    net, other = model(), model()
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, plain, range(5))
    optimizer = adamw(other)
    train(other, optimizer, range(40))
    tracker = optimizer.zclip
    with pytest.warns(zclip_ext.ZClipWarning, match="start afresh"):
        optimizer.load_state_dict(saved_and_loaded(plain.state_dict()))
    assert optimizer.zclip is tracker  # who holds it keeps seeing the run
    assert tracker.state_dict()["steps"] == 0
    assert optimizer.state_dict()["param_groups"][0]["zclip_steps"] == 0
    other.load_state_dict(net.state_dict())
    train(other, optimizer, range(5, 8))
    train(net, plain, range(5, 8))
    assert_same(weights(net), weights(other))


def test_p30_a_wrapper_state_goes_into_the_inner_optimizer():
    net, other = model(), model()
    optimizer = adamw(net)
    train(net, optimizer, range(5))
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
    plain.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    other.load_state_dict(net.state_dict())
    train(net, optimizer, range(5, 8))
    train(other, plain, range(5, 8))
    assert_same(weights(net), weights(other))


@pytest.mark.parametrize("state", [{}, {"state": {}, "param_groups": []}, None])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="state_dict: got no 'param_groups'"):
        adamw(model()).load_state_dict(state)


def test_a_bad_state_changes_nothing():
    net = model()
    optimizer = adamw(net)
    train(net, optimizer, range(30))
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["param_groups"][0]["zclip_var"] = -1.0
    bad["param_groups"][0]["lr"] = 77.0
    with pytest.raises(ValueError, match="'var'.*-1.0"):
        optimizer.load_state_dict(bad)
    fewer = copy.deepcopy(before)
    fewer["param_groups"][0]["params"] = [0]
    fewer["param_groups"][0]["zclip_steps"] = 77
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(fewer)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("robust", [False, True])
def test_distributed_checkpoint_state_dicts(flatten, robust):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    whole, net, other = model(), model(), model()
    straight = adamw(whole, robust_warmup=robust)
    train(whole, straight, range(40), spikes={30})
    optimizer = adamw(net, robust_warmup=robust)
    train(net, optimizer, range(20))
    state = get_optimizer_state_dict(net, optimizer, options=options)
    state = saved_and_loaded(state)
    resumed = adamw(other, robust_warmup=robust)
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, resumed, state, options=options)
    assert resumed.zclip.state_dict() == optimizer.zclip.state_dict()
    train(other, resumed, range(20, 40), spikes={30})
    assert_same(weights(whole), weights(other))


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("saved_from", ["wrapper", "inner"])
@pytest.mark.parametrize("loaded_into", ["wrapper", "inner"])
def test_distributed_checkpoints_on_disk(tmp_path, saved_from, loaded_into, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def optimizer_of(net, kind):
        return adamw(net) if kind == "wrapper" else torch.optim.AdamW(net.parameters(), lr=1e-2)

    first, second = model(), model()
    saved, loaded = optimizer_of(first, saved_from), optimizer_of(second, loaded_into)
    train(first, saved, range(10))
    dcp.save({"optimizer": get_optimizer_state_dict(first, saved, options=options)}, checkpoint_id=tmp_path)
    # A live wrapper has keys that a checkpoint of the inner optimizer alone lacks.
    partial = saved_from == "inner" and loaded_into == "wrapper"
    state = {"optimizer": get_optimizer_state_dict(second, loaded, options=options)}
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=partial))
    set_optimizer_state_dict(second, loaded, state["optimizer"], options=options)
    second.load_state_dict(first.state_dict())
    if loaded_into == "wrapper":
        assert loaded.zclip.metrics()["samples"] == (10 if saved_from == "wrapper" else 0)
    train(first, saved, range(10, 13))
    train(second, loaded, range(10, 13))
    assert_same(weights(first), weights(second))
