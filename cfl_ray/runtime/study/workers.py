"""Processes that run the cells of a study, one cell at a time each."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Literal

from cfl_ray.core.errors import Interrupted, RunStopped, UserError
from cfl_ray.runtime.launch import StudyPlace, run_cell
from cfl_ray.runtime.study.cells import Cell
from cfl_ray.runtime.study.packing import Packing

_ATTEMPTS = 3  # to run a cell whose process dies
_LOOK_SECONDS = 1.0
_END_SECONDS = 30  # in which a cell whose parent was killed writes what it has
_at_work = threading.Event()  # a cell runs in this process


@dataclass(frozen=True)
class Outcome:
    """How the run of a cell ended."""

    cell: Cell
    status: Literal["finished", "failed", "stopped"]
    seconds: float
    reason: str = ""


def run_cells(
    cells: Sequence[Cell], root: Path, packing: Packing, tick: Callable[[list[Cell]], None] = lambda live: None
) -> Iterator[Outcome]:
    """Runs the cells in processes, so many at a time, and yields each as it ends.

    A cell whose process dies is run again, where it was saved last. An interruption stops the cells at work, which keep
    what they have saved, and starts no others.

    tick: called about once a second with the cells at work.
    """
    waiting, attempts = list(cells), dict.fromkeys(map(id, cells), 0)
    while waiting:
        pool = ProcessPoolExecutor(packing.at_once, get_context("spawn"), _become_worker, (os.getpid(),))
        running: dict[Future[Outcome], Cell] = {}
        try:
            while waiting or running:
                while waiting and len(running) < packing.at_once:
                    cell = waiting.pop(0)
                    attempts[id(cell)] += 1
                    running[pool.submit(_run, cell, root, packing.hosts)] = cell
                for future in wait(running, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
                    outcome = future.result()
                    del running[future]
                    yield outcome
                tick(list(running.values()))
        except BrokenProcessPool:  # a process was killed, and with it the pool: those at work are run again
            for cell in running.values():
                if attempts[id(cell)] < _ATTEMPTS:
                    waiting.insert(0, cell)
                else:
                    yield Outcome(cell, "failed", 0.0, f"its process died {_ATTEMPTS} times; is the memory too small?")
        except BaseException:
            for process in active_children():  # the cells at work keep what they have saved
                if process.pid is not None:
                    os.kill(process.pid, signal.SIGINT)
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _run(cell: Cell, root: Path, hosts: int | None) -> Outcome:
    """Runs one cell, or goes on with it. In a worker process."""
    began = time.monotonic()
    _at_work.set()

    def outcome(status: Literal["finished", "failed", "stopped"], reason: str = "") -> Outcome:
        return Outcome(cell, status, time.monotonic() - began, reason)

    try:
        run_cell(cell.experiment, cell.folder(root), StudyPlace(root, cell.setting, cell.method), hosts)
    except (Interrupted, RunStopped, KeyboardInterrupt) as error:
        return outcome("stopped", str(error))
    except UserError as error:
        return outcome("failed", str(error))
    except Exception as error:
        return outcome("failed", f"{type(error).__name__}: {error}")
    finally:
        _at_work.clear()
    return outcome("finished")


def _become_worker(parent: int) -> None:
    """Makes this process end with its parent, and interrupts the cell at work when the parent says so."""
    os.setpgrp()  # Ctrl-C on the terminal reaches the parent, which tells its workers
    signal.signal(signal.SIGINT, _interrupt)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)  # the cell at work keeps what it has saved
        time.sleep(_END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _interrupt(*_: Any) -> None:
    if _at_work.is_set():
        _at_work.clear()  # once: what ends the run is not interrupted
        raise KeyboardInterrupt
