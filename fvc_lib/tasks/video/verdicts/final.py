"""The network of all groups: what it is worth, and how its scores compare with those that decide for it.

Nothing is left to test it. When to answer and where a score stands is therefore taken from the folds' out-of-fold
scores, which other networks gave. The videos that chose its epoch and temperature were not trained on and have
out-of-fold scores as well: on them both can be compared. That they chose makes it look a little better than it is.
"""

import numpy as np
import polars as pl

from fvc_lib.metrics.abstention import abstention_rates, left_out_p_values, witnesses
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video.verdicts.rule import KnownVideos, Rule, agreeing, percent
from fvc_lib.tasks.video.verdicts.scoring import FINAL, networks_of_run

WORTH = (
    "One network, trained on all groups, with no number of its own: its worth is taken to be that of the folds' "
    "out-of-fold numbers, of networks made by the same recipe from fewer groups."
)
TAKEN_OVER = (
    "When an answer is given is taken over from the folds' out-of-fold scores, which other networks gave: the stated "
    "rates hold as far as this network's scores are like theirs. Its log odds are held back where they would be larger "
    "than theirs."
)
NOT_COMPARED = "How its scores compare with theirs is not known."


def known_videos_of_final(paths: RunPaths) -> KnownVideos:
    """Return the run's videos, with the log odds by its network of all groups where they chose its epoch.

    Raises:
        UsageError: the run has no such network, or a fold is not finished.
        DataError: a table of the run is missing or damaged.
    """
    folds = networks_of_run(paths, final=True).folds
    temperature = folds[FINAL].temperature
    return KnownVideos.of(paths, sorted(folds.keys() - {FINAL}), final_temperature=temperature)


def agreement_table(paths: RunPaths) -> pl.DataFrame:
    """Of the videos that chose its epoch, by label: ``label videos groups this_network out_of_fold difference``.

    The last three are medians: of calibrated probabilities of fake, and of the difference of log odds. Raises as
    ``known_videos_of_final``.
    """
    return _agreement(known_videos_of_final(paths).tested)


def _agreement(tested: pl.DataFrame) -> pl.DataFrame:
    both = tested.drop_nulls("final_logit").with_columns(
        by_this=pl.Series(probabilities(tested["final_logit"].drop_nulls().to_numpy(), 1.0)),
        more=pl.col("final_logit") - pl.col("logit") / pl.col("temperature"),
    )
    return (
        both.group_by("label")
        .agg(
            videos=pl.len(),
            groups=pl.col("group_id").n_unique(),
            this_network=pl.col("by_this").median(),
            out_of_fold=pl.col("score").median(),
            difference=pl.col("more").median(),
        )
        .sort("label", descending=True)
    )


def final_sentences(known: KnownVideos, rule: Rule) -> tuple[str, ...]:
    """Return the limits of its answers, and how its scores compare on the videos that chose its epoch."""
    tested = known.tested
    compared = tested["final_logit"].is_not_null()
    if not compared.any():
        return (WORTH, TAKEN_OVER, NOT_COMPARED)
    scores = tested.select(pl.coalesce("final_logit", pl.col("logit") / pl.col("temperature"))).to_series().to_numpy()
    said = known.answers_to(left_out_p_values(known.witnesses, tested["group_id"], scores), rule)
    threshold = known.threshold(rule)
    said = [agreeing(*each, threshold) for each in zip(said, probabilities(scores, 1.0).tolist(), strict=True)]
    chosen = compared.to_numpy()
    of = known.witnesses
    part = witnesses(of.labels[chosen], of.scores[chosen], tested["group_id"].to_numpy()[chosen], of.folds[chosen])
    rates = [abstention_rates(part, np.array(answers)[chosen].tolist()) for answers in (said, known.answers(rule))]
    shares = [[percent(each) for each in (of.called_fake, of.called_real, of.undecided)] for of in rates]
    medians = [
        f"{label}s {this:.3f} (theirs {other:.3f})"
        for label, this, other in _agreement(tested).select("label", "this_network", "out_of_fold").iter_rows()
    ]
    groups = tested.filter(compared)["group_id"].n_unique()
    told = (
        f"Compared on the {int(chosen.sum()):,} of the run's videos, in {groups:,} groups, that chose its epoch and "
        f"were not trained on: by its scores the rule calls {shares[0][0]} of the reals fake and {shares[0][1]} of the "
        f"fakes real and leaves {shares[0][2]} undecided; by the out-of-fold scores of the same videos {shares[1][0]}, "
        f"{shares[1][1]} and {shares[1][2]}. Median scores: {', '.join(medians)}. That they chose makes it look a "
        "little better than it is."
    )
    return (WORTH, TAKEN_OVER, told)
