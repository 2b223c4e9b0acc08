import numpy as np
import pytest

from fvc_lib.corpus.samples import forgeries, videos
from fvc_lib.corpus.samples.forgeries import MANIPULATIONS
from fvc_lib.corpus.samples.scenes import Shot, draw_camera, generator_for, render_shot
from fvc_lib.corpus.samples.videos import change_of, plan_events

HEIGHT, WIDTH, FRAMES = 96, 128, 30
EVENTS = plan_events()


@pytest.fixture(scope="module")
def base():
    return render_shot(Shot("base", WIDTH, HEIGHT, FRAMES, draw_camera("base")))


@pytest.fixture(scope="module")
def donor():
    return render_shot(Shot("donor", WIDTH, HEIGHT, FRAMES, draw_camera("donor")))


def forge(name, base, donor, seed=0):
    return forgeries.forge(name, base, donor, generator_for("forger", seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["region_splice", "local_resynthesis"])
def test_a_region_changes_in_every_frame_and_moves(name, seed, base, donor):
    changed = forge(name, base, donor, seed)[:, :HEIGHT] != base[:, :HEIGHT]
    share = changed.mean(axis=(1, 2))
    assert share.min() > 0.08
    assert share.max() < 0.36
    assert (changed[0] != changed[-1]).mean() > 0.005


@pytest.mark.parametrize("seed", range(5))
def test_a_spliced_region_shows_the_donor(seed, base, donor):
    forged = forge("region_splice", base, donor, seed)
    assert np.array_equal(forged[forged != base], donor[forged != base])


@pytest.mark.parametrize("name", MANIPULATIONS)
def test_the_record_says_where_and_when_the_clip_was_changed(name, base, donor):
    change = MANIPULATIONS[name].draw(FRAMES, generator_for("forger", 0))
    differs = (forge(name, base, donor) != base)[:, :HEIGHT]
    said = np.zeros_like(differs)
    said[change.first_frame : change.end_frame] = True
    if change.region:
        said &= np.array(change.region.masks(FRAMES, HEIGHT, WIDTH))
    assert not (differs & ~said).any(), "nothing changed outside"
    assert differs[said].mean() > 0.3, "and much inside"


def test_a_crop_of_the_clip_has_its_region_in_its_own_frame():
    event = next(e for e in EVENTS if e.manipulation == "region_splice" and any(c.variant == "crop" for c in e.clips))
    whole, crop = change_of(event, event.clips[0]), next(c for c in event.clips if c.variant == "crop")
    top, left, height, width = videos._crop_box(event.height, event.width, crop.path)
    mask = np.array(whole.region.masks(event.num_frames, event.height, event.width))
    inside = np.array(change_of(event, crop).region.masks(event.num_frames, height, width))
    assert np.array_equal(inside, mask[:, top : top + height, left : left + width])
