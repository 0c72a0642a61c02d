"""How many tokens are drafted: simulated texts on simulated devices, where the time of every choice is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformers_llamacpp.decoding.drafting.pace import FixedPace, Pace

pytestmark = pytest.mark.once

TOKENS = 256
PROMISED = 1 / 0.95


@dataclass(frozen=True)
class Device:
    """Durations in plain steps: one more token in a decode, one drafted token; and how long drafts may be."""

    slope: float
    draft: float
    wanted: int

    def round(self, n: int) -> float:
        return 1 + n * (self.slope + self.draft)


DEVICES = {
    "CPU, prompt lookup": Device(0.25, 0, 10),
    "slow CPU, prompt lookup": Device(0.5, 0, 10),
    "GPU, prompt lookup": Device(0.02, 0, 10),
    "GPU, long prompt lookup": Device(0.02, 0, 20),
    "CPU, small draft model": Device(0.25, 0.1, 10),
    "GPU, small draft model": Device(0.02, 0.2, 10),
    "CPU, the model itself": Device(0.25, 1, 5),
    "GPU, the model itself": Device(0.02, 1, 20),
    "CPU, a larger model": Device(0.25, 2.5, 20),
}

Acceptance = Callable[[int], float]
"""Of a drafted token after accepted ones, by the tokens there are so far."""

ACCEPTANCES: dict[str, Acceptance] = {
    "never": lambda done: 0,
    "0.3": lambda done: 0.3,
    "0.6": lambda done: 0.6,
    "0.9": lambda done: 0.9,
    "0.9, then never": lambda done: 0.9 if done < TOKENS // 2 else 0,
    "never, then 0.9": lambda done: 0 if done < TOKENS // 2 else 0.9,
}


def simulate(pace: Pace, device: Device, accept: Acceptance, seed: int = 0, noise: bool = False, clock: float = 1) -> float:
    """The time of a text, in plain steps per token. With `noise` the pace is told durations that are up to 20 % off, and
    every thirtieth five times too long; the time counted is the true one. `clock`: seconds of a plain step."""
    rng = random.Random(seed)

    def told(steps: float) -> float:
        return clock * steps * (rng.uniform(0.8, 1.2) * (5 if rng.random() < 1 / 30 else 1) if noise else 1)

    done, time = 0, 0.0
    while done < TOKENS:
        n = pace.limit(min(device.wanted, TOKENS - done))
        assert 0 <= n <= device.wanted
        accepted = 0
        while accepted < n and rng.random() < accept(done):
            accepted += 1
        if n:
            pace.observe(n, accepted, sum(told(device.draft) for _ in range(n)), told(1 + n * device.slope))
        else:
            pace.observe_plain(told(1))
        time += device.round(n)
        done += accepted + 1
    return time / done


def make(device: Device) -> Pace:
    return Pace(draft_cost=0) if device.draft == 0 else Pace()


@pytest.mark.parametrize("noise", [False, True], ids=["exact", "noisy"])
@pytest.mark.parametrize("accept", ACCEPTANCES)
@pytest.mark.parametrize("name", DEVICES)
def test_never_slower_than_promised(name: str, accept: str, noise: bool) -> None:
    device = DEVICES[name]
    times = [simulate(make(device), device, ACCEPTANCES[accept], seed, noise) for seed in range(20)]
    assert max(times) <= PROMISED, times
    assert fmean(times) <= 1.045


@pytest.mark.parametrize("noise", [False, True], ids=["exact", "noisy"])
@pytest.mark.parametrize("accept", ["0.3", "0.6", "0.9"])
@pytest.mark.parametrize("name", DEVICES)
def test_nearly_as_fast_as_the_best_length(name: str, accept: str, noise: bool) -> None:
    """In the median, for two of the first three durations may be five times too long, and that costs much of one text;
    and but for the four plain steps that are taken to measure them."""
    device, p = DEVICES[name], float(accept)
    best = min(device.round(n) / sum(p**i for i in range(n + 1)) for n in range(device.wanted + 1))
    mine = median(simulate(make(device), device, ACCEPTANCES[accept], seed, noise) for seed in range(20))
    assert mine <= 1.12 * best + 4 / TOKENS, (mine, best)


@pytest.mark.parametrize(
    ("name", "at_least"),
    [("CPU, prompt lookup", 1.9), ("GPU, prompt lookup", 4.8), ("CPU, small draft model", 1.5), ("GPU, small draft model", 2)],
)
def test_a_predictable_text_is_faster(name: str, at_least: float) -> None:
    device = DEVICES[name]
    assert fmean(simulate(make(device), device, ACCEPTANCES["0.9"], seed, True) for seed in range(20)) < 1 / at_least


@pytest.mark.parametrize(("name", "at_least"), [("CPU, prompt lookup", 1.1), ("GPU, prompt lookup", 1.4)])
@pytest.mark.parametrize("accept", ["0.9, then never", "never, then 0.9"])
def test_a_text_that_changes_is_noticed(name: str, at_least: float, accept: str) -> None:
    device = DEVICES[name]
    assert fmean(simulate(make(device), device, ACCEPTANCES[accept], seed, True) for seed in range(20)) < 1 / at_least


@pytest.mark.parametrize(("name", "at_most"), [("GPU, prompt lookup", 0.3), ("CPU, prompt lookup", 0.85)])
def test_a_device_that_is_slow_at_first_is_tried_again(name: str, at_most: float) -> None:
    """The first two decodes of a draft take four times as long, and the first of each length twice."""
    device, times = DEVICES[name], []
    for seed in range(20):
        pace, rng, done, time, seen = make(device), random.Random(seed), 0, 0.0, set[int]()
        while done < TOKENS:
            n = pace.limit(device.wanted)
            accepted = next((i for i in range(n) if rng.random() >= 0.9), n)
            slow = (4 if len(seen) < 2 else 2) if n not in seen else 1
            if n:
                pace.observe(n, accepted, 0, slow * device.round(n) * rng.uniform(0.8, 1.2))
                seen.add(n)
            else:
                pace.observe_plain(rng.uniform(0.8, 1.2))
            done, time = done + accepted + 1, time + device.round(n)
        times.append(time / done)
    assert max(times) <= PROMISED and median(times) < at_most, times


def test_drafts_accepted_as_a_whole_or_not_at_all() -> None:
    device, times = DEVICES["CPU, prompt lookup"], []
    for seed in range(20):
        pace, rng, done, time = make(device), random.Random(seed), 0, 0.0
        while done < TOKENS:
            n = pace.limit(device.wanted)
            accepted = n if rng.random() < 0.5 else 0
            if n:
                pace.observe(n, accepted, 0, 1 + n * device.slope)
            else:
                pace.observe_plain(1)
            done, time = done + accepted + 1, time + device.round(n)
        times.append(time / done)
    assert fmean(times) < 1.12 * device.round(10) / 6  # ten tokens each time: 3.5 steps for (11 + 1) / 2 tokens


@given(st.integers(0, 1000), st.floats(1e-5, 100))
def test_the_unit_of_time_does_not_matter(seed: int, clock: float) -> None:
    device = DEVICES["CPU, small draft model"]
    clock = 2.0 ** round(clock)  # exact
    alone = simulate(Pace(), device, ACCEPTANCES["0.6"], seed, True)
    assert simulate(Pace(), device, ACCEPTANCES["0.6"], seed, True, clock) == alone


def test_empty_drafts_are_plain_steps() -> None:
    pace = Pace(draft_cost=0)
    for _ in range(200):
        pace.observe(0, 0, 0.0, 1.0)
    assert pace.limit(10) > 2


def test_empty_drafts_that_cost_time_are_paid() -> None:
    pace, asked = Pace(), 0
    for _ in range(TOKENS):
        if pace.limit(5):
            asked += 1
            pace.observe(0, 0, 1.0, 1.0)
        else:
            pace.observe_plain(1.0)
    assert 0 < asked <= (PROMISED - 1) * TOKENS


def test_a_second_text_begins_with_what_was_learned() -> None:
    device, pace = DEVICES["CPU, the model itself"], Pace()
    simulate(pace, device, ACCEPTANCES["0.9"])
    assert simulate(pace, device, ACCEPTANCES["0.9"]) < 1.012


def test_drafting_comes_back_after_decodes_became_slower() -> None:
    """A long pause in which the context grew: every decode takes ten times what drafts are remembered to have taken."""
    device, pace = DEVICES["CPU, prompt lookup"], Pace(draft_cost=0)
    simulate(pace, device, ACCEPTANCES["never"])
    simulate(pace, device, lambda done: 0.9 if done < 50 else 0, clock=1)
    assert fmean(simulate(pace, device, ACCEPTANCES["0.9"], seed, clock=10) for seed in range(3)) < 0.65


def test_durations_of_nothing() -> None:
    pace = Pace()
    for _ in range(50):
        n = pace.limit(4)
        if n:
            pace.observe(n, 0, 0.0, 0.0)
        else:
            pace.observe_plain(0.0)
    assert 0 <= pace.limit(4) <= 4


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=60))
def test_any_durations(rounds: list[tuple[int, float, float, float]]) -> None:
    pace = Pace()
    for wanted, share, draft, verify in rounds:
        n = pace.limit(wanted)
        assert 0 <= n <= wanted
        pace.observe(n, int(share * n), draft, verify)


def test_fixed() -> None:
    pace = FixedPace()
    for _ in range(20):
        assert pace.limit(7) == 7
        pace.observe(7, 0, 1, 100)
    assert pace.limit(0) == 0
