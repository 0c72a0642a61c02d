"""Continuous batching: calls that wait at the same time share one `llama_decode`.

There is no thread that decodes. A call that wants tokens decoded and finds nobody at it does so itself, for all that wait
(it *leads*); the others sleep until their rows are there. After a decode the calls that took part are expected back with
their next token shortly, and when the last of them is there the same thread leads again: llama.cpp's own threads belong to
the thread that calls it, and those of several callers would fight for the cores. Nobody waits long for a call that takes its
time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import DecodeError, LlamaCppError
from .guarded_lock import GuardedLock
from .mix import mixed
from .pool import SequencePool
from .turn import Ask, CallersOwn, Part, can_step, cells_full, serve

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

PATIENCE = 0.5
"""A call is waited for at most this part of the last decode's time, and one that mostly takes longer not at all."""

SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.05
"""Seconds; bounds of that."""

PROMPT_SECONDS = 0.1
"""A prompt that is read while other calls write gets portions that take about so long."""

PORTION = 64
"""Tokens of such a portion at least, and as long as nothing is known of the machine's speed."""

LOOK = 0.5
"""Seconds after which one who waits looks for itself."""

INTERRUPTED = "the thread that decoded for this call was interrupted; call generate() again"

WEIGHT = 0.3
"""Of the last value in a running mean."""


@dataclass(slots=True)
class _Caller:
    """A thread inside `generate()`. `thinks`: seconds from its rows to its next tokens, a running mean. `writes`: the last it
    asked for was no prompt."""

    depth: int = 0
    writes: bool = False
    answered: float | None = None
    thinks: float | None = None


@dataclass(slots=True)
class _Pace:
    """What decodes took."""

    last: float = 0.0
    per_token: float | None = None
    """Of prompts."""

    def note(self, seconds: float, parts: list[Part]) -> None:
        self.last = seconds
        prompt = sum(part.n for part in parts if not part.ask.dense)
        if prompt * 2 > PORTION:
            value = seconds / sum(part.n for part in parts)
            self.per_token = value if self.per_token is None else self.per_token + WEIGHT * (value - self.per_token)

    @property
    def patience(self) -> float:
        return min(max(PATIENCE * self.last, SHORTEST_WAIT), LONGEST_WAIT)

    @property
    def portion(self) -> int:
        return PORTION if not self.per_token else max(PORTION, int(PROMPT_SECONDS / self.per_token))


class Scheduler:
    """`ready` raises where the model was closed meanwhile; it is called under `lock`, the engine's, as every decode is made."""

    def __init__(self, pool: SequencePool, lock: GuardedLock, ready: Callable[[], None]) -> None:
        self._pool, self._lock, self._ready = pool, lock, ready
        # for what follows; never held while waiting for the engine's lock. Reentrant, so that a thread that was interrupted
        # between a block and its end finds it open
        self._mutex = threading.RLock()
        self._queue: list[Ask] = []
        self._leader: Ask | None = None
        """Whose thread decodes."""
        self._usual = 0
        """The thread that did so last."""
        self._gatherer: Ask | None = None
        """Whose thread does if those who are away do not come back by the deadline. With a queue there is one of the two."""
        self._deadline = 0.0
        self._away: set[int] = set()
        """Callers that are expected back."""
        self._callers: dict[int, _Caller] = {}
        self._born = 0
        self.shared = False
        """Calls have shared decodes, so that their texts lie scattered over the buffer; whoever puts that right says so."""
        self._pace = _Pace()

    # -- callers -------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """While this thread is inside `generate()`."""
        me, inside = threading.get_ident(), self._lock.mine
        outer = self._callers.get(me)
        depth = 0 if outer is None else outer.depth
        try:
            with self._mutex:
                self._callers.setdefault(me, _Caller()).depth = depth + 1
            yield
        finally:
            with self._mutex:
                if depth:
                    self._callers[me].depth = depth
                else:
                    self._callers.pop(me, None)
                    self._back(me)
            if not inside:
                self._lock.let_go()

    @property
    def running(self) -> int:
        """Calls that run, with those inside another one."""
        return sum(caller.depth for caller in list(self._callers.values()))

    def wait_until_left(self, seconds: float) -> bool:
        """Whether all calls have ended by then."""
        deadline = time.perf_counter() + seconds
        while self._callers and time.perf_counter() < deadline:
            time.sleep(0.01)
        return not self._callers

    @property
    def alone(self) -> bool:
        """Nobody could share a decode with the calling thread."""
        return len(self._callers) < 2 or self._lock.mine

    # -- decoding ------------------------------------------------------------------------------------------------

    def decode(self, ask: Ask) -> None:
        """Return when the ask is done or `displaced`. Not under the engine's lock.

        Raises the ask's own error, and whatever interrupts this thread; then nobody decodes any of its tokens any more once
        the engine's lock was to be had.
        """
        try:
            if self._joins(ask) or self._sleep(ask):
                self._lead(ask)
        except BaseException:
            with self._mutex:
                self._withdraw(ask)
            while self._mutex._is_owned():  # type: ignore[attr-defined]  # an interrupt may have come just before it was given back
                self._mutex.release()
            raise
        if ask.error is not None:
            raise ask.error

    def _joins(self, ask: Ask) -> bool:
        """Queue the ask; whether this thread leads."""
        with self._mutex:
            self._born += 1
            ask.born = self._born
            self._queue.append(ask)
            caller = self._callers.get(ask.caller)
            if caller is not None and caller.answered is not None:
                thought = time.perf_counter() - caller.answered
                caller.thinks = thought if caller.thinks is None else caller.thinks + WEIGHT * (thought - caller.thinks)
                caller.answered = None
            self._away.discard(ask.caller)
            if self._leader is not None:
                return False
            if self._away:
                if self._gatherer is None:
                    self._gatherer = ask
                return False
            return self._appoint(ask)

    def _appoint(self, ask: Ask) -> bool:
        """Somebody leads now: who did so last if it waits too, else `ask`. Whether it is `ask`; mutex held."""
        leader = next((one for one in self._queue if one.caller == self._usual), ask)
        self._leader, self._gatherer = leader, None
        if leader is not ask:
            _wake(leader)
        return leader is ask

    def _sleep(self, ask: Ask) -> bool:
        """Until the ask is finished (False), or it is this thread's turn to lead (True).

        Looks by itself now and then: who should have said so may have been interrupted just before.
        """
        while True:
            with self._mutex:
                if ask.finished:
                    return False
                if self._leader is ask:
                    return True
                if self._leader is None and self._gatherer is None:
                    self._leader = ask
                    return True
                seconds = LOOK
                if self._gatherer is ask:
                    seconds = self._deadline - time.perf_counter()
                    if seconds <= 0 or not self._away:
                        self._away.clear()
                        if self._appoint(ask):
                            return True
                        seconds = LOOK
            ask.wake.acquire(timeout=seconds)

    def _lead(self, mine: Ask) -> None:
        """Decode until `mine` is finished, whoever leads then."""
        try:
            self._usual = mine.caller
            while True:
                self._lock.let_others()
                with self._lock:
                    self._ready()
                    self._round()
                with self._mutex:
                    if mine.finished:
                        return
                    if self._away:  # those who took part come back first
                        self._leader, self._gatherer = None, mine
                if not self._sleep(mine):
                    return
        finally:
            with self._mutex:
                self._withdraw(mine)

    def _withdraw(self, ask: Ask) -> None:
        """It wants nothing any more, nor does its thread decode: the one who waits longest does, at once or when those who are
        away are back; mutex held."""
        if ask in self._queue:
            self._queue.remove(ask)
        if self._leader is ask:
            self._leader = None
        if self._gatherer is ask:
            self._gatherer = None
        if not self._queue or self._leader is not None or self._gatherer is not None:
            return
        if self._away:
            self._gatherer = self._queue[0]
            _wake(self._gatherer)
        elif self._appoint(self._queue[0]):
            _wake(self._queue[0])

    def _back(self, caller: int) -> None:
        """This caller is not expected any more; mutex held."""
        self._away.discard(caller)
        if not self._away and self._gatherer is not None:
            _wake(self._gatherer)

    # -- one decode; under the engine's lock ---------------------------------------------------------------------

    def _round(self) -> None:
        with self._mutex:
            waiting = list(self._queue)
            reading = {ask.caller for ask in waiting if not ask.dense}
            writing = any(one.writes and caller not in reading for caller, one in self._callers.items())
        for ask in waiting:
            self._prepare(ask)
        for ask in waiting:  # only now: a context that was made again may have come up empty
            ask.displaced = ask.left > 0 and not ask.resident()
        waiting = [ask for ask in waiting if not ask.displaced and ask.error is None]
        portion = self._pace.portion if writing or any(ask.dense for ask in waiting) else None
        parts = mixed(waiting, self._pool.backend.limits, portion)
        self.shared = self.shared or len(parts) > 1
        began = time.perf_counter()
        try:
            if parts:
                self._serve(parts)
                self._go_on([part.ask for part in parts])
        except BaseException as error:
            for part in parts:  # what they have is in the books, or not: each call looks for itself
                part.ask.displaced = part.ask.left > 0
            # on the main thread a signal's handler may have raised it, such as a timeout's, between any two lines
            if not isinstance(error, Exception) or (_on_main() and not isinstance(error, LlamaCppError)):
                raise
            # of one call, nobody knows which: each goes on alone, and meets its own
            logger.debug("a decode of %d calls failed", len(parts), exc_info=True)
            self._set_right(parts)
        finally:
            now = time.perf_counter()
            if parts:
                self._pace.note(now - began, parts)
            with self._mutex:
                self._answered(now, [part.ask for part in parts])

    def _prepare(self, ask: Ask) -> None:
        """See to it that the ask can be served."""
        try:
            if ask.batch is not None and ask.batch.layers:
                self._pool.room.record_layers(True)  # another call may have done without
        except LlamaCppError as error:
            ask.error = error

    def _set_right(self, parts: list[Part]) -> None:
        """After a decode that may have stored a part of it: the memory holds what the books say. Before the lock is given
        away, for others copy these sequences."""
        for sequence in {sequence for part in parts for sequence in part.ask.sequences}:
            if sequence.resident and not self._pool.rewind(sequence, len(sequence)):
                self._pool.reset_tokens(sequence, sequence.tokens)

    def _serve(self, parts: list[Part]) -> None:
        busy = {sequence for part in parts for sequence in part.ask.busy}
        try:
            if serve(self._pool, parts, busy):
                return
        except DecodeError as error:
            self._set_right(parts)
            if error.status == 2:  # aborted, for all of them
                for part in parts:
                    part.ask.error = error
                return
            if len(parts) == 1:
                parts[0].ask.error = error
                return
        for part in parts:
            self._serve_alone(part)

    def _go_on(self, asks: list[Ask]) -> None:
        """The next step of those whose caller need not look: no thread wakes up for it, and none waits for another one's turn
        with the interpreter. On the main thread only of its own call, for there an interrupt comes between any two lines."""
        me, main = threading.get_ident(), _on_main()
        for ask in asks:
            if ask.error is not None or ask.displaced or (main and ask.caller != me):
                continue
            try:
                ask.go_on()
            except CallersOwn as own:
                ask.error = own.error
            except BaseException as error:
                ask.error = error if isinstance(error, Exception) else DecodeError(INTERRUPTED, 2)
                if not isinstance(error, Exception):
                    raise
            # what has to slide or to be refused is its caller's business
            ask.displaced = ask.left > 0 and ask.tokens is not None and not can_step(self._pool, ask.sequences, ask.tokens)

    def _serve_alone(self, part: Part) -> None:
        """What is wrong with one call is nothing to the others; and where there is no room for all, there may be for each."""
        ask = part.ask
        if not ask.resident():
            ask.displaced = True
            return
        try:
            if not serve(self._pool, [part], ask.busy):
                raise cells_full(self._pool, part.n, ask.busy)
        except LlamaCppError as error:
            self._set_right([part])
            ask.error = error

    def _answered(self, now: float, served: list[Ask]) -> None:
        """Wake those whose asks are finished, and let others go first with what is left; mutex held."""
        self._deadline = now + self._pace.patience
        for ask in list(self._queue):
            if not (ask.displaced or ask.error is not None or ask.left == 0):
                continue
            ask.finished = True
            self._queue.remove(ask)
            caller = self._callers.get(ask.caller)
            if caller is not None and not ask.displaced and ask.error is None:
                caller.answered, caller.writes = now, ask.dense
                if caller.thinks is None or caller.thinks < self._pace.patience:
                    self._away.add(ask.caller)
            _wake(ask)
        for ask in served:
            if ask in self._queue:
                self._queue.remove(ask)
                self._queue.append(ask)


def _on_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _wake(ask: Ask) -> None:
    if ask.wake.locked():
        ask.wake.release()
