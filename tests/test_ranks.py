"""Many ranks: real process groups (gloo), each layout against the unsharded model. Cases E of the field.

The workers stand in tests/ranks; one launch for each number of ranks runs all cases.
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "ranks"))
import launch

NORMS = {
    2: [
        "ddp",
        *(f"fsdp1:{s}:{o}" for s in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for o in (True, False)),
        "fsdp1:FULL_SHARD:True:bf16",
        "fsdp1:FULL_SHARD:False:bf16",
        "fsdp2",
        "fsdp2:offload",
        "tp",
        "sequence_parallel",
        "mixed",
        "partial_gradients",
    ],
    4: ["ddp", "fsdp1:HYBRID_SHARD:True", "fsdp1:HYBRID_SHARD:False", "fsdp2", "fsdp2:hsdp", "fsdp2_tp", "tp"],
}
STREAMS = ["ddp", "fsdp2"]
OTHERS = {
    2: [
        *("p57", "p58", "p61", "p62", "p64", "p66", "p67:True", "p67:False", "p69", "raise_on_all"),
        *("undeclared_stages", "same_seed_experts", "shards_outside_of_shared_by", "values_that_cannot_be_read"),
        *("weights_with_nan:all", "weights_with_nan:one", "weights_with_nan:differ", "a_list_that_differs_by_rank"),
        *("declared_on_one_rank", "a_rank_without_parameters", "pickled"),
        *("bad_gradient_on_one_rank:nan", "bad_gradient_on_one_rank:inf", "training_apart", "inconsistent", "pipeline"),
    ],
    4: ["p60", "stages_with_replicas", "wrongly_declared", "one_stage_wrong", "bad_gradient_on_one_rank:nan"],
}
CHECKPOINTS = ["ddp", "fsdp1:FULL_SHARD:True", "fsdp1:FULL_SHARD:False", "fsdp2"]


def checkpoint_case(step, layout, folder=""):
    kind, *rest = layout.split(":")
    return ":".join([f"checkpoint_{step}", kind, f"{folder}/{'-'.join([kind, *rest])}", *rest])


@pytest.fixture(scope="module")
def reports():
    """What each rank of each case returned, by number of ranks and case."""
    found = {1: launch.run([f"one_sample_each:{name}" for name in STREAMS], 1)}
    with tempfile.TemporaryDirectory() as folder:
        for world, steps in ((2, ("save", "load")), (4, ("load",))):
            names = [f"norm:{name}" for name in NORMS[world]] + OTHERS[world]
            names += [f"one_sample_each:{name}" for name in STREAMS]
            names += [checkpoint_case(step, layout, folder) for layout in CHECKPOINTS for step in steps]
            found[world] = {case.replace(folder, ""): report for case, report in launch.run(names, world).items()}
    return found


def of(reports, world, case):
    """The reports of all ranks, none of which is an error."""
    found = reports[world][case]
    for rank, report in enumerate(found):
        assert report is not None, f"rank {rank} of {case} said nothing"
        assert not str(report).startswith("error: "), f"rank {rank} of {case}: {report}"
    return found


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NORMS.items() for name in names])
def test_norm_and_clip_are_those_of_the_whole_model(reports, world, name):
    found = of(reports, world, f"norm:{name}")
    first = found[0]
    assert first["norm"] == pytest.approx(first["wanted"], rel=1e-6)
    assert all(report["bits"] == first["bits"] for report in found)
    assert all(report["state"] == first["state"] for report in found)
    for report in found:
        # Float32 rounding of the gradients: the ranks add up in another order than one process does.
        assert report["worst"] < 3e-6
        assert report["same_shape"]
        assert report["collectives"] == 1  # of 16 bytes, whatever the layout


def test_p57_a_sharded_gradient_has_one_norm(reports):
    first, second = of(reports, 2, "p57")
    assert (first[0], second[0]) == (5.0, 5.0)
    assert (first[1], second[1]) == (pytest.approx(0.6), pytest.approx(0.8))
    assert first[2] == second[2]


def test_p58_nothing_is_added_to_a_part(reports):
    assert of(reports, 2, "p58") == [pytest.approx(2**0.5 * 1e-6, rel=1e-6)] * 2


def test_p60_replicas_count_once(reports):
    assert of(reports, 4, "p60") == [5.0] * 4


def test_p61_experts_add_up(reports):
    first, second = of(reports, 2, "p61")
    assert first[0] == second[0] == pytest.approx(10.954451, rel=1e-6)
    assert first[1] == second[1]  # the dense gradient after the clip, bit for bit


def test_p62_stages_chunks_and_tied_copies(reports):
    for stages, chunks, samples, tied in of(reports, 2, "p62"):
        assert (stages, chunks, samples, tied) == (5.0, 5.0, 1, 20.0)


def test_p62_a_pipeline_of_torch(reports):
    first, second = of(reports, 2, "pipeline")
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_p62_stages_with_replicas(reports):
    assert of(reports, 4, "stages_with_replicas") == [5.0] * 4


def test_p63_plain_parameters_beside_sharded_ones(reports):
    for report in of(reports, 2, "norm:mixed"):
        assert report["norm"] == pytest.approx(report["wanted"], rel=1e-6)


def test_p64_a_rank_without_gradients_joins_in(reports):
    for norms, collectives in of(reports, 2, "p64"):
        assert norms == [5.0] * 4
        assert collectives == [1, 1]  # it depends on the model alone how many


def test_p66_where_the_backend_can_reduce(reports):
    assert of(reports, 2, "p66") == [["cuda:3", "cuda:3", "cpu"]] * 2


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_p67_a_subset_of_fsdp1(reports, use_orig_params):
    for result, wanted, error in of(reports, 2, f"p67:{use_orig_params}"):
        assert result == pytest.approx(wanted, rel=1e-6)
        assert "hand it in, as ZClipOptimizer(..., model=model)" in error


@pytest.mark.parametrize("name", STREAMS)
def test_p68_the_norms_do_not_depend_on_the_number_of_ranks(reports, name):
    one = of(reports, 1, f"one_sample_each:{name}")[0]
    for world in (2, 4):
        for norms in of(reports, world, f"one_sample_each:{name}"):
            assert norms == pytest.approx(one, rel=1e-5)


def test_p69_gradients_that_are_not_averaged_are_warned_of_once(reports):
    for averaged, first, second in of(reports, 2, "p69"):
        assert averaged == second == []
        assert len(first) == 1
        assert "is it called within DDP.no_sync()" in first[0]


@pytest.mark.parametrize(("world", "value"), [(2, "nan"), (2, "inf"), (4, "nan")])
def test_a_bad_gradient_on_one_rank_is_everyones(reports, world, value):
    for report in of(reports, world, f"bad_gradient_on_one_rank:{value}"):
        assert report == {"skipped": True, "unchanged": True, "counts": [2, 1, 1, 1], "next_step_ran": True}


def test_an_error_is_everyones(reports):
    assert of(reports, 2, "raise_on_all") == ["raised"] * 2


@pytest.mark.parametrize(
    ("world", "case", "what"),
    [
        (2, "undeclared_stages", "ranks 0 and 1 don't hold the same parameters"),
        (2, "weights_with_nan:one", "don't hold the same parameters"),
        (2, "weights_with_nan:differ", "don't hold the same parameters"),
        (2, "declared_on_one_rank", "2 ranks are said to hold .*, but only 0 do"),
        (2, "a_rank_without_parameters", "2 ranks are said to hold .*, but only 0 do"),
        (4, "wrongly_declared", "ranks 0 and 1 don't hold the same parameters"),
        (4, "one_stage_wrong", "ranks 2 and 3 don't hold the same parameters"),
    ],
)
def test_a_layout_that_is_wrong_or_not_known_is_everyones_error(reports, world, case, what):
    first, *others = of(reports, world, case)
    assert re.search(f"{what}.*shared_by=", first)
    assert all(report == first for report in others)


def test_a_layout_that_shows_late_is_found_when_weights_have_moved(reports):
    for at_once, later in of(reports, 2, "same_seed_experts"):
        assert at_once == "no error"
        assert "don't hold the same parameters" in later


def test_shards_outside_of_shared_by_are_an_error(reports):
    # At calls that compare layouts and at those that don't.
    for rank, errors in enumerate(of(reports, 2, "shards_outside_of_shared_by")):
        assert len(errors) == 4
        assert all("is split over ranks 0, 1, but shared_by says" in error for error in errors)
        assert f"spread over {rank} alone" in errors[-1]


def test_what_cannot_be_read_is_not_compared(reports):
    assert of(reports, 2, "values_that_cannot_be_read") == [5.0] * 2
    assert of(reports, 2, "weights_with_nan:all") == ["no error"] * 2


def test_a_list_that_differs_by_rank_does_not_hang(reports):
    first, second = of(reports, 2, "a_list_that_differs_by_rank")
    assert first == second
    assert first[:3] == [5.0] * 3


def test_pickle_of_what_holds_a_group_is_refused(reports):
    for whole, error in of(reports, 2, "pickled"):
        assert whole == "ZClip()"
        assert "group= or shared_by= can't be pickled" in error


def test_ranks_that_train_apart(reports):
    assert of(reports, 2, "training_apart") == [1.0, 2.0]


def test_consistency_is_proved_and_the_odd_rank_named(reports):
    for report in of(reports, 2, "inconsistent"):
        assert report == "ZClip's state is not the same on all ranks: rank 1 differs from most in warmup_mean"


@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_saved_on_two_ranks_and_loaded_on_two_and_four(reports, layout):
    saved = of(reports, 2, checkpoint_case("save", layout))
    after = {}
    for world in (2, 4):
        loaded = of(reports, world, checkpoint_case("load", layout))
        assert all(report[0] == saved[0] for report in loaded)  # the statistics, bit for bit
        assert all(report == loaded[0] for report in loaded)
        after[world] = loaded[0]
    assert after[2][1:] == pytest.approx(after[4][1:], rel=1e-4)


def test_a_rank_that_dies_leaves_the_others_with_an_error():
    reports = launch.run(["one_rank_dies"], 2, timeout=120)
    survivor, dead = reports["one_rank_dies"]
    assert survivor.startswith("error as it should be")
    assert dead.startswith("error: the process ended")
