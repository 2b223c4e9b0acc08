import pickle

import torch

from fvc_lib.engine.task import EpochSampleSet
from fvc_lib.tasks.video_text.training import PreparedSamples
from tests.kits.video_text_kit import pairs, planned

PLAN = planned(num_frames=8)


def samples(seed: int = 0) -> PreparedSamples:
    beside = {"beside": torch.arange(12).reshape(6, 2)}
    return PreparedSamples(pairs(plan=PLAN), beside, num_hidden=3, seed=seed)


def test_every_sample_has_what_stands_beside_it():
    data = samples()
    batch = data.__getitems__([4, 1])
    assert batch.tensors["beside"].tolist() == [[8, 9], [2, 3]]
    assert batch.tensors["frames"].equal(pairs(plan=PLAN).__getitems__([4, 1]).tensors["frames"])
    assert data[4].tensors["hidden"].equal(batch.tensors["hidden"][0])
    assert data[4].sample_id == batch.sample_ids[0]
    assert len(data) == 6


def test_what_is_hidden_depends_on_sample_epoch_and_seed_alone():
    data = samples()
    whole = data.__getitems__(range(6)).tensors["hidden"]
    assert whole.sum(1).tolist() == [3] * 6
    parts = torch.cat([data.__getitems__([0]).tensors["hidden"], data.__getitems__([1, 2, 3]).tensors["hidden"]])
    assert whole[:4].equal(parts)
    assert pickle.loads(pickle.dumps(data)).__getitems__(range(6)).tensors["hidden"].equal(whole)
    assert len({tuple(row) for row in whole.tolist()}) > 1
    assert not samples(seed=1).__getitems__(range(6)).tensors["hidden"].equal(whole)


def test_every_epoch_hides_others_and_an_epoch_always_the_same():
    data = samples()
    assert isinstance(data, EpochSampleSet)
    first, second = (data.at_epoch(epoch).__getitems__(range(6)).tensors["hidden"] for epoch in (1, 2))
    assert not first.equal(second)
    assert data.at_epoch(2).at_epoch(1).__getitems__(range(6)).tensors["hidden"].equal(first)
