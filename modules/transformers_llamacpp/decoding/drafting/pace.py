"""How many tokens are worth drafting next: none where speculation would be slower than plain decoding.

A round drafts `n` tokens, verifies them in one decode, and gains those accepted and one more. Leviathan et al. 2023
(https://arxiv.org/abs/2211.17192, section 3.5) choose `n` from a known acceptance and known costs; here both are
measured while the text is made. They depend on the text (code repeats itself, poems do not), on the device (five tokens
cost a GPU what one does, a CPU two to three times as much) and on the draft model, which may be no faster than the model
it drafts for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

__all__ = ["FixedPace", "Pace"]

GRACE = 3.0
"""Plain steps that may be lost on a text before anything was gained, and"""

RATE = 0.02
"""plain steps that may be lost for each token after it: together 3.2 % of a text of 256 tokens."""

CREDIT = 16.0
"""Plain steps gained that may be lost again, when the text stops being predictable."""

MARGIN = 1.02
"""Times faster than plain decoding that a draft has to promise."""

FORGET = 0.9
"""What a round's outcome counts for after one more round: the last ten or so decide."""

HOPE = (1.6, 0.4)
"""Acceptances and rejections that are believed in before the first draft."""

SLOPE = 0.25
"""What one more token in a decode is taken to cost, in plain steps, before it is measured: a CPU's."""

PROBE = 2
"""Tokens drafted to see whether a text has become predictable: the first, and whether more would follow."""

PROBE_SHARE = 0.01
"""Of the time, that such probes are expected to lose; they come at least `FIRST_PAUSE` and at most `LAST_PAUSE` rounds
after the last draft."""

FIRST_PAUSE, LAST_PAUSE = 8, 256

PLAIN_EVERY = 48
"""Rounds after which a plain step is taken to know what it costs by now."""

SURE = 3
"""Durations after which a cost counts as known. One alone may be off by any factor: something else held it up."""

SETTLED = 8
"""Rounds after which it counts as exact. Until then the shorter durations are believed: a device is slow at first (memory
is set up, kernels are compiled), and what a text pays in the account is worked out again with each round."""

DISAGREE = 1.4
"""Times the shortest plain step, or a short decode of a draft, that the median plain step may be. More, and something
else held up most of those known."""

SAMPLES = 15
"""Durations of one kind that are kept; their median is what counts."""


PER_LENGTH = 4
"""Of drafts of one length."""


class Pace:
    """Decides from what it is told about past rounds; it reads no clock and loads nothing.

    Two rules choose the length of a draft. It must be the one that promises most tokens a second, from the acceptance
    and the costs of the last rounds. And if nothing of it were accepted, the time lost must still be there to lose: an
    account, in plain steps, that starts with `GRACE`, earns `RATE` with each token and what speculation gains (up to
    `CREDIT`), and pays what it loses. So no text is much slower than without drafts, whatever it and the costs do.

    Acceptance is two numbers: that of a draft's first token, and that of a token after an accepted one. A copied
    passage is accepted as a whole, and one number for both would see a coin tossed at every token. While only single
    tokens are drafted nothing is learned of the second, which then moves towards the first.

    Costs are a line through what the last rounds took: something for a draft as such, and something for each of its
    tokens.

    May be kept for the next text of the same two models, which then begins with what was learned.

    Args:
        draft_cost: what drafting a token is taken to cost before it is measured, in plain steps; 0 for drafts made
            without a model.
    """

    def __init__(self, draft_cost: float = 1.0) -> None:
        self._guess = (SLOPE, draft_cost)
        self._plain: deque[float] = deque(maxlen=SAMPLES)
        self._rounds: deque[tuple[int, float, float]] = deque(maxlen=SAMPLES)
        """Tokens drafted, seconds for drafting and for verifying them."""
        self._lengths: dict[int, deque[tuple[int, float, float]]] = {}
        """The last few of each length: while all drafts have one length, these still tell what others cost."""
        self._plain_seconds = 0.0
        self._draft_steps, self._token_steps = 0.0, sum(self._guess)
        """What a draft as such and each of its tokens add to a round, in plain steps."""
        self._first, self._next = _Odds(*HOPE), _Odds(*HOPE)
        self._account = GRACE
        self._unpaid: list[int] = []
        """The drafts that were made while it was not known exactly what they cost."""
        self._since_plain = self._since_draft = 0
        self._wanted = 1

    # ---- what happened ------------------------------------------------------------------------------------------

    def observe_plain(self, seconds: float) -> None:
        """A step without a draft, which gave one token, took `seconds`."""
        self._plain.append(seconds)
        self._measure()
        self._since_plain = 0
        self._since_draft += 1
        self._earn(RATE)

    def observe(self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        """A round: the first `accepted` of `drafted` tokens were taken, and one more that the model chose.

        `drafted` may be 0, where the drafter had no idea: then it was a plain step, and nothing was rejected.
        """
        if drafted < 1:
            self.observe_plain(verify_seconds)
            self._earn(-min(draft_seconds / self._plain_seconds, max(1.0, self._cost(1))))
            return
        self._rounds.append((drafted, draft_seconds, verify_seconds))
        self._lengths.setdefault(drafted, deque(maxlen=PER_LENGTH)).append(self._rounds[-1])
        self._measure()
        stale = self._since_draft >= self._pause()
        self._since_plain += 1
        self._since_draft = 0
        self._first.forget(stale)
        self._next.forget(stale)
        self._first.add(min(accepted, 1), int(accepted == 0))
        if accepted:
            self._next.add(accepted - 1, int(accepted < drafted))
        # owed is what such a round usually costs: one that something else held up says nothing about drafts
        self._unpaid.append(drafted)
        self._earn(accepted + (accepted + 1) * RATE)
        if len(self._rounds) >= SETTLED:
            self._account, self._unpaid = self._left(), []

    def _earn(self, steps: float) -> None:
        self._account += min(steps, CREDIT - self._left())

    def _left(self) -> float:
        return self._account - sum(map(self._cost, self._unpaid))

    # ---- what to do ---------------------------------------------------------------------------------------------

    def limit(self, wanted: int) -> int:
        """How many tokens to draft in the next round, `0 <= n <= wanted`. 0: take a plain step."""
        self._wanted = max(wanted, 1)
        if self._needs_plain():
            return 0
        left = max(self._left(), 0.0)
        affordable = wanted
        if self._cost(wanted) > left:
            affordable = max(int((left - self._draft_steps) / max(self._token_steps, 1e-9)), 0)
        best = self._best(min(affordable, wanted))
        if best == 0 and self._since_draft >= self._pause():
            return min(PROBE, affordable, wanted)
        return best

    def _needs_plain(self) -> bool:
        """At first before each draft, and while durations disagree: all else is measured in plain steps."""
        known = len(self._plain)
        if known < min(SURE, 1 + len(self._rounds)):
            return True
        if self._since_plain >= (PLAIN_EVERY if known > SURE else SETTLED):
            return True
        if known < 2 or self._since_draft >= 2 * SURE:
            return False
        shortest = min(self._plain) if known < 2 * SURE else _usual((seconds for _, _, seconds in self._rounds), 0.25)
        return self._plain_seconds > DISAGREE * shortest > 0

    def _best(self, most: int) -> int:
        """The length that promises most tokens per plain step; 0 where none promises `MARGIN` times what that gives."""
        best, speed = 0, MARGIN
        gain, reached, following = 1.0, self._first.mean, self._next.pulled(self._first.mean)
        for n in range(1, most + 1):
            gain += reached
            reached *= following
            if gain / (1 + self._cost(n)) > speed:
                best, speed = n, gain / (1 + self._cost(n))
        return best

    def _pause(self) -> float:
        """Rounds without a draft before a probe, in proportion to what it is expected to lose; fewer while that is only a
        guess."""
        if len(self._rounds) < SURE:
            return FIRST_PAUSE
        if (1 + self._wanted) / (1 + self._cost(self._wanted)) <= MARGIN:
            return LAST_PAUSE  # the costs alone forbid it, were everything accepted; but costs change too
        first = self._first.mean
        lost = self._cost(PROBE) - first * (1 + self._next.pulled(first))
        return min(max(FIRST_PAUSE, lost / PROBE_SHARE), LAST_PAUSE)

    # ---- costs --------------------------------------------------------------------------------------------------

    def _cost(self, n: int) -> float:
        """What a draft of `n` tokens adds to a round, in plain steps."""
        return self._draft_steps + n * self._token_steps

    def _measure(self) -> None:
        self._plain_seconds = max(_usual(self._plain, 0.5), 1e-9)
        if not self._plain or not self._rounds:
            return
        added = [self._added(*one) for one in self._rounds]
        per_token = [steps / n for n, steps in added]
        if len(added) < SETTLED:
            if len(added) < SURE:  # the guess is one more sample
                per_token.append(sum(self._guess))
            self._draft_steps, self._token_steps = 0.0, _usual(per_token, 0.25)
            return
        each = [self._added(*one) for same in self._lengths.values() for one in same]
        slopes = [(y - x) / (m - n) for (n, x), (m, y) in itertools.combinations(each, 2) if n != m]
        through_zero = _usual(per_token, 0.5)
        # a slope needs drafts of different lengths; what disagrees with everything else is noise
        slope = min(max(_usual(slopes, 0.5), through_zero / 2), through_zero) if len(slopes) >= SAMPLES else through_zero
        self._token_steps = slope
        self._draft_steps = max(_usual((steps - n * slope for n, steps in added), 0.5), 0.0)

    def _added(self, n: int, drafting: float, verifying: float) -> tuple[int, float]:
        """`n`, and what that round took beyond a plain step."""
        return n, drafting / self._plain_seconds + max(verifying / self._plain_seconds - 1, 0)


class FixedPace(Pace):
    """Always as many as wanted, whatever it costs."""

    def limit(self, wanted: int) -> int:
        return max(wanted, 0)


class _Odds:
    """How often something happened, with less and less weight for what is long ago."""

    def __init__(self, yes: float, no: float) -> None:
        self.yes, self.no = yes, no

    @property
    def mean(self) -> float:
        return self.yes / (self.yes + self.no)

    def pulled(self, towards: float) -> float:
        """The mean with one more observation of `towards`, which is all that counts when nothing else is remembered."""
        return (self.yes + towards) / (self.yes + self.no + 1)

    def add(self, yes: float, no: float) -> None:
        self.yes += yes
        self.no += no

    def forget(self, stale: bool) -> None:
        """A round has passed. `stale`: so many rounds that all of this together counts as one."""
        keep = min(FORGET, 1 / (self.yes + self.no)) if stale else FORGET
        self.yes *= keep
        self.no *= keep


def _usual(values: Iterable[float], share: float) -> float:
    """The value that `share` of the others are below, at most: 0.5 for the median, of two the lower. 0 for none."""
    known = sorted(values)
    return known[int((len(known) - 1) * share)] if known else 0.0
