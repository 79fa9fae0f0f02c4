"""The models: equal results whatever shares the batch, and a name that changes with the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from monitor.config.settings import Settings
from monitor.errors import ConfigError
from monitor.matching.mask_step import save_mask_step
from monitor.runtime.models import Models, load_models
from tests.support.planted_features import plain_net
from tests.support.recorded_channel import RecordedChannel


def test_features_of_a_picture_do_not_depend_on_its_batch(recorded: RecordedChannel) -> None:
    frames = [sample.frame for sample in recorded.samples[:5]]
    alone = [recorded.models.encode([frame])[0][0] for frame in frames]
    assert all(np.array_equal(one, row) for one, (row, _) in zip(alone, recorded.rows, strict=False))


def test_a_picture_that_several_frames_hold_has_one_feature_row(recorded: RecordedChannel) -> None:
    first, other = recorded.samples[0].frame, recorded.samples[40].frame
    (one, _), (two, _), (again, _) = recorded.models.encode([first, other, first])
    assert one is again or np.shares_memory(one, again)
    assert not np.array_equal(one, two)


def test_the_name_changes_with_the_weights(recorded: RecordedChannel) -> None:
    encoder = recorded.models.encoder
    assert recorded.models.name.startswith(f"{encoder.encoder_id}+")
    assert Models(encoder, recorded.models.net).name == recorded.models.name
    assert Models(encoder, plain_net()).name != recorded.models.name


def test_weights_trained_on_another_encoder_are_refused(recorded: RecordedChannel, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_mask_step(recorded.models.net, path, trained_on="another", configuration={})
    with pytest.raises(ConfigError, match=r"trained on features of another.*run scripts/train_vsal\.py"):
        load_models(Settings(data_dir=tmp_path), path)
