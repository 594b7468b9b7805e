"""The options: spelling, dictionaries, what the error of a bad one says."""

import json

import pytest

from zclip_ext import ZClip, ZClipConfig


def test_round_trip_through_json():
    config = ZClipConfig(max_grad_norm=1, patience=None, log_space=True)
    assert ZClipConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert isinstance(config.max_grad_norm, float)


@pytest.mark.parametrize(("key", "hint"), [("z_tresh", "did you mean 'z_thresh'"), ("qqq", "known options: alpha, ")])
def test_unknown_option_is_named(key, hint):
    with pytest.raises(ValueError, match=f"unknown ZClip option '{key}'; {hint}"):
        ZClipConfig.from_dict({key: 2})
    with pytest.raises(ValueError, match=f"unknown ZClip option '{key}'"):
        ZClip(**{key: 2})


@pytest.mark.parametrize("options", [None, 3, ["alpha"]])
def test_options_are_a_mapping(options):
    with pytest.raises(TypeError, match="expected a mapping"):
        ZClipConfig.from_dict(options)


def test_mode_is_checked():
    with pytest.raises(ValueError, match="mode: got 'mean', allowed is one of 'zscore', 'percentile'"):
        ZClipConfig.from_dict({"mode": "mean"})


def test_published_is_the_paper_alone():
    config = ZClipConfig.published(z_thresh=3.0)
    assert (config.patience, config.min_rel_std, config.z_thresh, config.max_grad_norm) == (None, 0.0, 3.0, None)


def test_bounds_in_order():
    with pytest.raises(ValueError, match="min_threshold: got 2.0"):
        ZClipConfig(min_threshold=2.0, max_threshold=1.0)


def test_config_or_options_not_both():
    config = ZClipConfig(alpha=0.9)
    assert ZClip(config).config is config
    with pytest.raises(TypeError, match="z_thresh beside a config"):
        ZClip(config, z_thresh=3.0)
    with pytest.raises(TypeError, match="config: got dict"):
        ZClip({"alpha": 0.9})


def test_frozen():
    with pytest.raises(AttributeError):
        ZClipConfig().alpha = 0.5


def test_repr_shows_what_was_chosen():
    assert repr(ZClip(z_thresh=3, max_grad_norm=1)) == "ZClip(z_thresh=3.0, max_grad_norm=1.0)"
