"""When an answer is given: the rule that a user states, and what it does to the run's own out-of-fold scores.

Fake or real is said where the other answer is unlikely at a stated rate (``metrics/abstention.py``); else undecided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import polars as pl

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
    p_values,
    witnesses,
)
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.metrics.operating_points import OperatingPoint, operating_point, threshold_at
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FINAL_VALIDATION, INDEX, KNOWN_VIDEOS, PREDICTIONS, read_table

WITHHELD = "The run is not shown to be above its controls, so its scores decide nothing."


@dataclass(frozen=True)
class Rule:
    """When an answer is given.

    Attributes:
        called_fake, called_real: which share of the reals may be called fake, and of the fakes real; inside (0, 1).
        point: an operating point on the run's out-of-fold scores, which an answer must agree with; none: nothing more.
        prior: share of fakes where the videos come from, for ``probability``; none: no such number.
        withheld: no answer is given whatever the score, because the run is not shown to be above its controls.
    """

    called_fake: float
    called_real: float
    point: OperatingPoint | None = None
    prior: float | None = None
    withheld: bool = False

    @property
    def rates(self) -> tuple[float, float]:
        """``called_fake`` and ``called_real``."""
        return self.called_fake, self.called_real


def rule_of(error_rate: float = 0.1, decide_at: str = "", prior: float = 0.0, *, withheld: bool = False) -> Rule:
    """Return the rule for a user's words: ``decide_at`` is empty, ``fpr=0.01`` or ``cost=5:1``; ``prior`` 0 is none.

    Raises:
        UsageError: a rate that is none, or another operating point.
    """
    for name, rate in (("error_rate", error_rate), *([("prior", prior)] if prior else [])):
        if not 0 < rate < 1:
            raise UsageError(f"{name}: got {rate:g}, wanted a share inside (0, 1), such as 0.1.")
    point = None
    if decide_at:
        try:
            point = operating_point(decide_at)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if point is not None and point.kind == "fpr":
        return Rule(point.false_positive_rate, error_rate, None, prior or None, withheld)
    return Rule(error_rate, error_rate, point, prior or None, withheld)


class KnownVideos:
    """A run's videos with the scores of networks that had not seen them.

    Attributes:
        rows: ``video_id group_id label content_sha256 perceptual_hash fold score logit temperature final_logit`` of
            all; the last five null where no score is stored. Of a run the columns of INDEX as well. ``final_logit`` is
            the calibrated log odds by the network of all groups, of the videos that chose its epoch.
        tested: the rows with a score, in the order of ``witnesses``.
        base_rates: of each fold, the share of fakes at which its scores are probabilities; None: not known.
        judges_rates: the same of each network that judges new videos.
    """

    def __init__(
        self,
        rows: pl.DataFrame,
        base_rates: Sequence[float | None] = (),
        judges_rates: Sequence[float | None] | None = None,
    ) -> None:
        self.rows, self.tested, self.base_rates = rows, rows.drop_nulls("score"), tuple(base_rates)
        self.judges_rates = self.base_rates if judges_rates is None else tuple(judges_rates)

    @classmethod
    def of(
        cls,
        run: RunPaths,
        folds: Sequence[int],
        base_rates: Sequence[float | None] = (),
        judges_rates: Sequence[float | None] | None = None,
        *,
        final_temperature: float = 0.0,
    ) -> Self:
        """Read those of a run or ensemble; with ``final_temperature`` log odds by its network of all groups, too."""
        scores = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in folds])
        scores = scores.select("video_id", "fold", "score", "logit", "temperature")
        by_final = pl.DataFrame(schema={"video_id": pl.String, "final_logit": pl.Float64})
        if final_temperature:
            by_final = read_table(run.final_validation, FINAL_VALIDATION)
            by_final = by_final.select("video_id", final_logit=pl.col("logit") / final_temperature)
        rows = read_table(run.index, INDEX)
        for more in (scores, by_final):
            rows = rows.join(more, on="video_id", how="left", maintain_order="left")
        return cls(rows, base_rates, judges_rates)

    def anonymous(self) -> pl.DataFrame:
        """Return KNOWN_VIDEOS in an order by content, with numbers for groups."""
        number = pl.col("group_id").rank("dense").cast(pl.String)
        rows = self.rows.with_columns(group_id="group_" + number).select(list(KNOWN_VIDEOS.columns))
        return rows.sort("content_sha256", "label", "fold")

    @cached_property
    def witnesses(self) -> Witnesses:
        """The tested videos, on the scale logit / temperature."""
        labels = (self.tested["label"] == FAKE).cast(pl.Int64).to_numpy()
        scores = (self.tested["logit"] / self.tested["temperature"]).to_numpy()
        return witnesses(labels, scores, self.tested["group_id"], self.tested["fold"])

    @cached_property
    def left_out(self) -> PValues:
        """The p-values of each tested video against those of other groups."""
        return left_out_p_values(self.witnesses, self.tested["group_id"])

    def threshold(self, rule: Rule) -> float | None:
        """Return the lowest score that the rule's operating point calls fake; None without one."""
        if rule.point is None:
            return None
        return threshold_at(rule.point, self.witnesses.labels, self.tested["score"].to_numpy())

    def telling(self, rule: Rule) -> frozenset[str]:
        """Return the answers that the run's videos of their own class get more often than those of the other."""
        return answers_that_tell(self.witnesses, self.left_out.answers(rule.rates))

    def answers_to(self, p_values: PValues, rule: Rule) -> list[str]:
        """Return the answers at the stated rates; an answer that tells nothing becomes undecided."""
        telling = self.telling(rule)
        return [said if said in telling else UNDECIDED for said in p_values.answers(rule.rates)]

    def answers(self, rule: Rule) -> list[str]:
        """Return the rule's answer to each tested video, set against videos of other groups alone."""
        said = self.answers_to(self.left_out, rule)
        threshold = self.threshold(rule)
        return [agreeing(*each, threshold) for each in zip(said, self.tested["score"].to_list(), strict=True)]

    def rates(self, rule: Rule) -> AbstentionRates:
        """Return the rates of errors and undecided answers on the run's own videos."""
        return abstention_rates(self.witnesses, self.answers(rule))


def agreeing(answer: str, score: float, threshold: float | None) -> str:
    """Return the answer if the threshold, if any, gives the same; else undecided."""
    if threshold is None or answer == (FAKE if score >= threshold else REAL):
        return answer
    return UNDECIDED


def percent(share: float) -> str:
    """Return a share as text: 0.1 is ``10 %``."""
    return f"{100 * share:.3g} %"


def rule_sentences(known: KnownVideos, rule: Rule) -> tuple[str, ...]:
    """Return sentences on the rule, its errors on the run's own videos, and what so few groups cannot show."""
    rates, (least_fake, least_real) = known.rates(rule), known.witnesses.least_rates
    reals, fakes = rates.num_groups
    shares = [percent(each) for each in (rates.called_fake, rates.called_real, rates.undecided)]
    told = [
        (
            f"Asked: at most {percent(rule.called_fake)} of the reals called fake and {percent(rule.called_real)} of "
            "the fakes called real; where neither answer keeps to that, undecided."
        ),
        (
            f"On the run's own {known.tested.height:,} tested videos, each set against those of other groups: "
            f"{shares[0]} of the reals called fake, {shares[1]} of the fakes called real, {shares[2]} undecided "
            f"({reals:,} groups with reals, {fakes:,} with fakes, each with one vote)."
        ),
    ]
    for what, asked, least, groups in (
        (FAKE, rule.called_fake, least_fake, reals),
        (REAL, rule.called_real, least_real, fakes),
    ):
        if least > asked * (1 + 1e-12):
            told.append(
                f"Nothing can be called {what}: {groups:,} groups cannot show a rate below {percent(least)}, "
                f"and {percent(asked)} was asked."
            )
            continue
        if what not in known.telling(rule):
            told.append(
                f"Nothing is called {what}: of the run's own videos this is not said more often where it is right than "
                "where it is wrong, by more than chance."
            )
    if (threshold := known.threshold(rule)) is not None:
        told.append(
            f"An answer must agree with {rule.point} ({rule.point and rule.point.says}): fake from a score of "
            f"{threshold:.3f} on."
        )
    if rule.prior is not None:
        told.append(_prior_sentence(known, rule.prior))
    return tuple(told)


def score_bounds(known: KnownVideos, rule: Rule) -> tuple[float | None, float | None]:
    """Return the highest score that is called real and the lowest that is called fake, where all networks agree.

    None: never, as for any score where the rule is withheld.
    """
    if rule.withheld:
        return None, None
    at = known.witnesses.scores
    # The rule changes next to a known score, and nowhere else.
    tried = np.unique([np.nextafter(at, np.inf), np.nextafter(at, -np.inf)])
    said = np.array(known.answers_to(p_values(known.witnesses, tried[:, None]), rule))
    scores = probabilities(tried, 1.0)
    if (threshold := known.threshold(rule)) is not None:
        said[(said == FAKE) & (scores < threshold) | (said == REAL) & (scores >= threshold)] = UNDECIDED
    real, fake = scores[said == REAL], scores[said == FAKE]
    return (float(real.max()) if real.size else None), (float(fake.min()) if fake.size else None)


def _prior_sentence(known: KnownVideos, prior: float) -> str:
    rates = [rate for rate in known.judges_rates if rate is not None]
    if len(rates) < len(known.judges_rates) or not rates:
        return "No 'probability': at which share of fakes the scores are calibrated is not recorded."
    shares = dict.fromkeys(map(percent, (min(rates), max(rates))))
    return (
        f"'probability' is the score where {percent(prior)} of the videos are fakes; the scores themselves are "
        f"calibrated on videos of which {' to '.join(shares)} were."
    )


def at_prior(logits: FloatArray, base_rates: Sequence[float | None], prior: float | None) -> float | None:
    """Return the mean probability of fake where the share ``prior`` of the videos are fakes.

    Between two populations that differ in how frequent fakes are alone, the odds of fake change by the ratio of the
    prior odds, whatever the video: M. Saerens, P. Latinne, C. Decaestecker, "Adjusting the outputs of a classifier to
    new a priori probabilities", Neural Computation 14 (2002), equation 2.4.

    Args:
        logits: float64 (K,), calibrated log odds of fake by each network.
        base_rates: K, the share of fakes at which each is calibrated.
        prior: inside (0, 1); none: nothing is asked.

    Returns:
        None where nothing is asked or a base rate is not known.
    """
    known = [rate for rate in base_rates if rate is not None]
    if prior is None or len(known) != len(logits):
        return None
    return float(probabilities(logits + log_odds(prior) - log_odds(np.array(known)), 1.0).mean())


def log_odds(share: npt.ArrayLike) -> FloatArray:
    """Return the log odds of shares inside (0, 1)."""
    of = np.asarray(share, dtype=np.float64)
    return np.asarray(np.log(of) - np.log1p(-of))
