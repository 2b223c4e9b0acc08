"""The rule that turns scores into verdicts, and its error rates on the run's out-of-fold scores.

The verdict is fake if few reals look as fake as the video, and real if few fakes look as real. Few means at most the
error rate, a share that the user sets (``metrics/abstention.py``). If neither or both hold, the verdict is undecided.

A run may also have a network trained on all groups. No group is left to test this network, so its verdicts rest on the
out-of-fold scores of the folds' networks. ``agreement_table`` compares its scores with the out-of-fold scores, on the
videos on which its temperature was chosen. These videos may be a validation part on which the epoch was chosen, too;
then the network looks a little better on them than it is. With cross-fitting they are all videos, and the compared
scores are those of networks that were trained without the video's group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from scipy.special import logit as log_odds

from fvc_lib.metrics.abstention import (
    FAKE,
    REAL,
    UNDECIDED,
    AbstentionRates,
    PValues,
    Witnesses,
    abstention_rates,
    answers_that_tell,
    left_out_p_values,
    witnesses,
)
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.errors import UsageError
from fvc_lib.services.tables import KNOWN_VIDEOS
from fvc_lib.tasks.video.calibration import MIN_GROUPS

WITHHELD = "The run is not shown to be above its controls, so its scores decide nothing."
UNCALIBRATED = (
    "Scores are no probabilities here, but ranks: a label has fewer than "
    f"{MIN_GROUPS} training groups, which calibrate nothing, or the runs of an ensemble are calibrated for different "
    "shares of fakes. So the column 'probability' stays empty."
)
WORTH = (
    "One network, trained on all groups, with no number of its own: its worth is taken to be that of the folds' "
    "out-of-fold numbers, of networks made by the same recipe from fewer groups."
)
TAKEN_OVER = (
    "When an answer is given is taken over from the folds' out-of-fold scores, which other networks gave: the stated "
    "rates hold as far as this network's scores are like theirs. Its log odds are held back where they would be larger "
    "than theirs."
)


@dataclass(frozen=True)
class Rule:
    """The conditions under which a video is called fake or real.

    Attributes:
        called_fake: the share of reals that may be called fake, inside (0, 1).
        called_real: the share of fakes that may be called real, inside (0, 1).
        prior: share of fakes among the new videos, which the column ``probability`` assumes; None: no such column.
        withheld: whether every video is undecided, because the run is not shown to be above its controls. Controls are
            predictors that see no pixel or learned other labels.
    """

    called_fake: float
    called_real: float
    prior: float | None = None
    withheld: bool = False

    @property
    def rates(self) -> tuple[float, float]:
        """The error rates ``(called_fake, called_real)``: shares of reals called fake, and of fakes called real."""
        return self.called_fake, self.called_real


def rule_of(
    error_rate: float = 0.1, false_alarm_rate: float = 0.0, prior: float = 0.0, *, withheld: bool = False
) -> Rule:
    """Check a user's options for verdicts, and return them as a ``Rule``.

    Args:
        error_rate: share of fakes that may be called real.
        false_alarm_rate: share of reals that may be called fake; 0: the same as ``error_rate``.
        prior: share of fakes among the new videos; 0: not known.
        withheld: whether every video is undecided (``Rule.withheld``).

    Raises:
        UsageError: a rate outside (0, 1).
    """
    called_fake = false_alarm_rate or error_rate
    for name, rate in (("error_rate", error_rate), ("fpr", called_fake), ("prior", prior or 0.5)):
        if not 0 < rate < 1:
            raise UsageError(f"{name}: got {rate:g}, wanted a share inside (0, 1), such as 0.1.")
    return Rule(called_fake, error_rate, prior or None, withheld)


class KnownVideos:
    """A run's videos with the scores of networks that had not seen them.

    Args:
        rows: the attribute ``rows``.
        base_rates: the attribute ``base_rates``.

    Attributes:
        rows: one row per video: ``video_id group_id label content_sha256 perceptual_hash fold score logit temperature
            final_logit``. The last five are null if no score is stored. Videos of a run also have the other columns of
            INDEX. ``final_logit`` is given only for the videos that calibrated the network trained on all groups. It is
            the calibrated log odds of fake by that network, or with cross-fitting by networks that were trained
            without the video's group.
        tested: the rows with a score, in the order of ``witnesses``.
        base_rates: for every network that judges new videos, the share of fakes in the videos that calibrated its
            scores; None: not known.
    """

    def __init__(self, rows: pl.DataFrame, base_rates: Sequence[float | None] = ()) -> None:
        self.rows, self.tested = rows, rows.drop_nulls("score")
        self.base_rates = tuple(base_rates)

    def anonymous(self) -> pl.DataFrame:
        """Return the rows as table KNOWN_VIDEOS, without names.

        Groups are numbered, and rows are sorted by content hash.
        """
        number = pl.col("group_id").rank("dense").cast(pl.String)
        rows = self.rows.with_columns(group_id="group_" + number).select(list(KNOWN_VIDEOS.columns))
        return rows.sort("content_sha256", "label", "fold")

    @cached_property
    def witnesses(self) -> Witnesses:
        """The tested videos with their calibrated log odds of fake; new videos are compared with them."""
        is_fake = (pl.col("label") == FAKE).cast(pl.Int64)
        log_odds = pl.col("logit") / pl.col("temperature")
        labels, scores = self.tested.select(is_fake, log_odds)
        return witnesses(labels, scores, self.tested["group_id"], self.tested["fold"])

    @cached_property
    def left_out(self) -> PValues:
        """The p-values of the answers real and fake for each tested video; a small p-value rules the answer out.

        The p-value of "real" is the share of the other groups' reals that look at least as fake as the video; that of
        "fake" is the share of their fakes that look at least as real (``metrics/abstention.py``).
        """
        return left_out_p_values(self.witnesses, self.tested["group_id"])

    def telling(self, rule: Rule) -> frozenset[str]:
        """Return the answers that carry information: a set with ``fake``, ``real``, both or none.

        The answers of the rule to the run's own videos are counted. ``fake`` carries information if fakes are called
        fake more often than reals are, by more than chance; for ``real`` likewise.
        """
        return answers_that_tell(self.witnesses, self.left_out.answers(rule.rates))

    def answers_to(self, p_values: PValues, rule: Rule) -> list[str]:
        """Return the answers for M videos at the rule's error rates: ``fake``, ``real`` or ``undecided``.

        An answer that carries no information (see ``telling``) is replaced by ``undecided``.

        Args:
            p_values: p-values of the answers real and fake for the M videos; a small one rules the answer out.
            rule: gives the error rates.
        """
        telling = self.telling(rule)
        return [answer if answer in telling else UNDECIDED for answer in p_values.answers(rule.rates)]

    def rates(self, rule: Rule) -> AbstentionRates:
        """Return the rule's error rates and share of undecided videos, measured on the run's own videos."""
        return abstention_rates(self.witnesses, self.answers_to(self.left_out, rule))


def percent(share: float) -> str:
    """Return a share as text: 0.1 is ``10 %``."""
    return f"{100 * share:.3g} %"


def rule_sentences(known: KnownVideos, rule: Rule) -> Iterator[str]:
    """Yield sentences on the rule, its error rates on the run's videos, and which answers it never gives."""
    rates, telling = known.rates(rule), known.telling(rule)
    reals, fakes = rates.num_groups
    yield (
        f"Asked: at most {percent(rule.called_fake)} of the reals called fake and {percent(rule.called_real)} of the "
        "fakes called real; where neither answer keeps to that, undecided."
    )
    yield (
        f"On the run's own {known.tested.height:,} tested videos, compared with the videos of other groups: "
        f"{percent(rates.called_fake)} of the reals called fake, {percent(rates.called_real)} of the fakes called "
        f"real, {percent(rates.undecided)} undecided ({reals:,} groups with reals, {fakes:,} with fakes, one vote per "
        "group). The report has other rates: it counts videos, and calls each fake or real by its fold's threshold."
    )
    for answer, groups in zip((FAKE, REAL), rates.num_groups, strict=True):
        if answer not in telling:
            yield (
                f"Nothing is called {answer}: on the run's own videos this answer is not given more often where it is "
                f"right than where it is wrong, by more than chance. {groups:,} groups show no rate below "
                f"{percent(1 / (groups + 1))}."
            )
    if None in known.base_rates:
        yield UNCALIBRATED
    elif rule.prior is not None:
        shares = [percent(rate) for rate in known.base_rates if rate is not None]
        yield (
            f"'probability' is the score where {percent(rule.prior)} of the videos are fakes. The scores themselves "
            f"are calibrated where this share of the videos are: {', '.join(dict.fromkeys(shares))}."
        )


def at_prior(logits: FloatArray, base_rates: Sequence[float | None], prior: float | None) -> float | None:
    """Return the probability of fake in a population with the share ``prior`` of fakes, averaged over networks.

    Where two populations differ only in the share of fakes, the odds of every video change by the ratio of the prior
    odds. See M. Saerens, P. Latinne, C. Decaestecker, "Adjusting the outputs of a classifier to new a priori
    probabilities", Neural Computation 14 (2002), equation 2.4.

    Args:
        logits: float64 (K,), calibrated log odds of fake of one video, by K networks.
        base_rates: K shares of fakes at which the networks are calibrated; None: not known.
        prior: share of fakes, inside (0, 1), or None.

    Returns:
        The probability; None without a prior, or if a base rate is not known.
    """
    known = [rate for rate in base_rates if rate is not None]
    if prior is None or len(known) != len(logits):
        return None
    odds = logits + log_odds(prior) - log_odds(np.array(known))
    return float(probabilities(odds, 1.0).mean())


def agreement_table(known: KnownVideos) -> pl.DataFrame:
    """Compare the network trained on all groups with the folds' networks, on the videos that calibrated it.

    Returns one row per label with columns ``label videos groups this_network out_of_fold difference``. ``videos`` and
    ``groups`` are counts. ``this_network`` and ``out_of_fold`` are medians of the calibrated probabilities of fake.
    ``difference`` is the median over videos of the difference of the log odds, this network minus out-of-fold.
    """
    both = known.tested.drop_nulls("final_logit")
    by_this = pl.Series(probabilities(both["final_logit"].to_numpy(), 1.0))
    difference = both["final_logit"] - both["logit"] / both["temperature"]
    both = both.with_columns(by_this=by_this, difference=difference)
    table = both.group_by("label").agg(
        videos=pl.len(),
        groups=pl.col("group_id").n_unique(),
        this_network=pl.col("by_this").median(),
        out_of_fold=pl.col("score").median(),
        difference=pl.col("difference").median(),
    )
    return table.sort("label", descending=True)
