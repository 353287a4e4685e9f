"""A run that advances one step at a time, so that two runs can be timed in turn."""

from collections.abc import Callable
from threading import Semaphore, Thread

Rest = Callable[[], None]
"""Called by a run at the end of each of its steps; returns when the next one is asked for."""


class _LeftError(Exception):
    """Nobody asks for another step."""


class StepByStep:
    """A run in a thread of its own, which works only during `step`; where the block ends, so does the run."""

    def __init__(self, run: Callable[[Rest], object]) -> None:
        self._run = run
        self._asked, self._rests = Semaphore(0), Semaphore(0)
        self._left = False
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._work)

    def __enter__(self) -> "StepByStep":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._asked.release()
        self._thread.join()

    def step(self) -> None:
        """The next step; the first one includes all that comes before it."""
        if self._failure is None:
            self._asked.release()
            self._rests.acquire()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._wait()
            self._run(self._rest)
            self._failure = RuntimeError("the run has no more steps")
        except _LeftError:
            pass
        except BaseException as error:  # whoever asks for a step is told
            self._failure = error
        finally:
            self._rests.release()

    def _rest(self) -> None:
        self._rests.release()
        self._wait()

    def _wait(self) -> None:
        self._asked.acquire()
        if self._left:
            raise _LeftError
