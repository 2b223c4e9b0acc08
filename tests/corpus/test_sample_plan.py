from collections import Counter

from fvc_lib.corpus.samples.forgeries import MANIPULATIONS
from fvc_lib.corpus.samples.videos import EVENTS_PER_LABEL, plan_events

EVENTS = plan_events()
CLIPS = [(event, clip) for event in EVENTS for clip in event.clips]


def test_the_corpus_is_large_enough_and_the_same_on_every_call():
    assert plan_events() == EVENTS
    assert len(EVENTS) == 40
    assert len(CLIPS) == 80
    assert len({event.name for event in EVENTS}) == len(EVENTS)
    assert len({clip.path for _, clip in CLIPS}) == len(CLIPS)


def test_labels_share_clips_and_manipulations_evenly():
    assert Counter(event.label for event in EVENTS) == {"real": EVENTS_PER_LABEL, "fake": EVENTS_PER_LABEL}
    assert Counter(event.label for event, _ in CLIPS) == {"real": 40, "fake": 40}
    copies = {
        label: Counter(len(event.clips) for event in EVENTS if event.label == label) for label in ("real", "fake")
    }
    assert copies["real"] == copies["fake"]
    manipulations = Counter(event.manipulation for event in EVENTS)
    assert manipulations == {None: EVENTS_PER_LABEL, **dict.fromkeys(MANIPULATIONS, 4)}
    assert all((event.manipulation is None) == (event.label == "real") for event in EVENTS)


def test_sizes_rates_codecs_and_copies_are_mixed_within_each_label():
    for label in ("real", "fake"):
        own = [(event, clip) for event, clip in CLIPS if event.label == label]
        assert len({(event.width, event.height) for event, _ in own}) >= 4
        assert len({clip.encoding.frames_per_second for _, clip in own}) >= 4
        assert len({clip.encoding.codec for _, clip in own}) == 3
        assert {clip.variant for _, clip in own} == {"original", "reencode", "rescale", "crop"}
        assert all(1.5 <= event.num_frames / clip.encoding.frames_per_second <= 2.7 for event, clip in own)
