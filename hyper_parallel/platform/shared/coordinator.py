"""Where two threads meet: one runs a micro-batch's forward, the other another one's backward, and the coordinator lets
each communicate only while the other computes.

Note [One computes while the other communicates]
    A layer with experts has four hooks: A before the dispatch, B after it, C before the combine, D after it. They cut
    the work into sections that communicate (A to B and C to D) and sections that compute (the rest). Backward passes
    the same hooks from D to A: the sections keep their kind.

        forward       compute |A comm |B compute |C comm |D compute |A comm  ...
        backward compute |D comm |C compute |B comm |A compute |D comm |C compute  ...

    A thread that comes to a hook waits there for the other to come to one. If one is about to communicate and the other
    to compute, both go on. If both are about to do the same (at the very start both want to communicate), backward goes
    on alone to its next hook; from there on the kinds differ, and the two stay in step as in the picture.

    So at most one of the two threads is in a section that communicates, and the order in which the sections come is
    the same on every rank, whatever the speed of the threads. That is what makes it safe for both threads to use one
    process group: a group needs its collectives in one order everywhere.

Note [In turns]
    With ``in_turns`` a single thread runs at a time. A section that communicates then only launches its collective, and
    the wait for it stands behind the next hook: there the thread hands its turn over, and what it has launched is under
    way while the other one computes.

        forward       compute, launch |B ......................... |wait, compute, launch |D ...
        backward      ............... |compute, wait, compute, launch |C ............... |wait, compute, launch |A

    So *all* that the two do comes in one order on every rank, the collectives inside of what computes too, such as
    those of tensor parallelism; and state of the process is seen by one thread at a time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Keep = Callable[[], Callable[[], None]]

HOOK_NAMES = ("A", "B", "C", "D")

# Which thread comes, and at which hooks a section that communicates begins. Recomputing (activation checkpointing)
# passes the hooks in forward's order, but inside the thread that runs backward.
_DIRECTIONS = {"forward": ("forward", "AC"), "backward": ("backward", "DB"), "recompute": ("backward", "AC")}
_PARTNER = {"forward": "backward", "backward": "forward"}


class HookCoordinator:
    """The meeting point of one forward thread and one backward thread.

    It starts disabled, and then lets everybody pass. For a stretch of overlapped work call `enable`, start the two
    threads, and run each inside `taking_part`; join them before the next `enable`:

        coordinator.enable()


        def forward_thread():
            with coordinator.taking_part():
                loss = model(next_micro_batch)


        def backward_thread():
            with coordinator.taking_part():
                loss_of_previous_micro_batch.backward()

    Args:
        timeout: seconds that a thread waits at a hook for the other before it gives up with `TimeoutError`.
        in_turns: let one thread run at a time, the forward thread first; see Note [In turns].
        keep: called where a thread hands its turn over; what it gives is called when the thread has it again. For state
            of the process, such as random generators, that each of the two has for itself.
    """

    _waiting: dict[str, tuple[object, bool]]
    _last_hook: dict[str, str]
    _finished: bool
    _failure: BaseException | None
    _turn: str
    _who: dict[int, str]

    def __init__(self, timeout: float = 300.0, in_turns: bool = False, keep: Keep | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"HookCoordinator: timeout must be a positive number of seconds, got {timeout}")
        self._timeout, self._in_turns, self._keep = timeout, in_turns, keep
        self._condition = threading.Condition()
        self._enabled = False
        self._begin()

    @property
    def enabled(self) -> bool:
        """Whether threads wait for each other: true from `enable` to `disable`."""
        return self._enabled

    def enable(self) -> None:
        """Begin a stretch of overlapped work: from now on each thread waits for the other at every hook."""
        with self._condition:
            self._begin()
            self._enabled = True
            self._condition.notify_all()

    def disable(self) -> None:
        """Let everybody pass from now on, also those who are waiting."""
        with self._condition:
            self._begin()
            self._enabled = False
            self._condition.notify_all()

    def finish(self) -> None:
        """Say that the calling thread will come to no more hooks: the other one runs free until the next `enable`."""
        with self._condition:
            self._finished = True
            self._condition.notify_all()

    def abort(self, exception: BaseException) -> None:
        """The calling thread failed: the other one gets a `RuntimeError` at the hook where it is or next comes."""
        with self._condition:
            if self._failure is None:
                self._failure = exception
            self._condition.notify_all()

    @contextmanager
    def taking_part(self, direction: str | None = None) -> Iterator[None]:
        """Run one of the two threads' work: `finish` when it ends, `abort` when it raises.

        In turns the `direction` of the work, "forward" or "backward", says whose turn it waits for before it begins.
        """
        if self._in_turns and direction not in _PARTNER:
            raise ValueError(
                f"taking_part: in turns it takes the direction, {' or '.join(map(repr, _PARTNER))}; got {direction!r}"
            )
        try:
            if self._in_turns and direction is not None:
                self._who[threading.get_ident()] = direction
                self._await_turn(direction, "its beginning")
            yield
        except BaseException as error:
            self.abort(error)
            raise
        self.finish()

    def rendezvous(self, hook_name: str, direction: str) -> None:
        """Come to a hook; return when the thread may go on: see Note [One computes while the other communicates].

        Args:
            hook_name: "A", "B", "C" or "D".
            direction: "forward"; "backward"; or "recompute" for a forward that runs again inside backward.
        """
        check_hook_name("rendezvous", hook_name)
        if direction not in _DIRECTIONS:
            raise ValueError(f"rendezvous: direction must be one of {', '.join(_DIRECTIONS)}; got {direction!r}")
        thread, communicates_from = _DIRECTIONS[direction]
        if self._in_turns:
            thread = self._who.get(threading.get_ident(), thread)  # else it works for one of the two, as autograd's do
            if hook_name not in communicates_from:
                self._hand_over(thread, hook_name)
            return
        with self._condition:
            if self._is_free():
                return
            if thread in self._waiting:
                raise RuntimeError(
                    f"rendezvous: a {thread} thread came to hook {hook_name} while another one waits at hook "
                    f"{self._last_hook[thread]}; a coordinator serves one forward thread and one backward thread"
                )
            # A token of its own for every arrival: gone from the table means released.
            arrival = object()
            self._waiting[thread] = (arrival, hook_name in communicates_from)
            self._last_hook[thread] = hook_name
            self._release()
            try:
                arrived_in_time = self._condition.wait_for(
                    lambda: self._waiting.get(thread, (None,))[0] is not arrival or self._is_free(), self._timeout
                )
            finally:
                if self._waiting.get(thread, (None,))[0] is arrival:
                    del self._waiting[thread]
            if not arrived_in_time:
                self._failure = TimeoutError(self._timeout_message(thread, f"hook {hook_name}"))
                self._condition.notify_all()
                raise self._failure

    def _hand_over(self, thread: str, hook_name: str) -> None:
        with self._condition:
            if self._is_free():
                return
            bring_back = None if self._keep is None else self._keep()
            self._last_hook[thread] = hook_name
            self._turn = _PARTNER[thread]
            self._condition.notify_all()
        self._await_turn(thread, f"hook {hook_name}")
        if bring_back is not None:
            bring_back()

    def _await_turn(self, thread: str, where: str) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: self._is_free() or self._turn == thread, self._timeout):
                self._failure = TimeoutError(self._timeout_message(thread, where))
                self._condition.notify_all()
                raise self._failure

    def _begin(self) -> None:
        self._turn, self._who = "forward", {}
        self._waiting = {}
        self._last_hook = {}
        self._finished = False
        self._failure = None

    def _is_free(self) -> bool:
        if not self._enabled:
            return True
        if self._failure is not None:
            raise RuntimeError(
                f"the other thread of the overlapped pair failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        return self._finished

    def _release(self) -> None:
        if len(self._waiting) < 2:
            return
        _, forward_communicates = self._waiting["forward"]
        _, backward_communicates = self._waiting["backward"]
        del self._waiting["backward"]
        if forward_communicates != backward_communicates:
            del self._waiting["forward"]
        self._condition.notify_all()

    def _timeout_message(self, thread: str, where: str) -> str:
        partner = _PARTNER[thread]
        if partner in self._last_hook:
            seen = f"was last seen at hook {self._last_hook[partner]}"
        else:
            seen = "never came to a hook"
        return (
            f"the {thread} thread waited {self._timeout:g} s at {where} for the {partner} thread, which "
            f"{seen}; run both threads inside taking_part(), so that one that ended or failed is not waited for"
        )


def check_hook_name(function: str, hook_name: str) -> None:
    """Raise `ValueError` unless `hook_name` is one of the four hooks."""
    if hook_name not in HOOK_NAMES:
        raise ValueError(f"{function}: hook_name must be one of {', '.join(HOOK_NAMES)}; got {hook_name!r}")
