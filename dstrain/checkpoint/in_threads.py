"""The same work on many files by a few threads: checksums, reads and writes all let other threads run."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """work(item) of every item, in their order, by this thread and at most `threads` - 1 more.

    After an error nothing new is begun, and the first one is raised. The threads are daemons: a disk that hangs cannot
    keep the process, which a pool's threads would.
    """
    waiting = deque(enumerate(items))
    results, errors = {}, []

    def run() -> None:
        while waiting and not errors:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = work(item)
            except BaseException as error:
                errors.append(error)

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(waiting)) - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(results))]
