"""Trials on the workers of a `dask.distributed` client; those of a worker that dies run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from demask.errors import BadInput, DemaskError
from demask.prune.searching.trial import Proposal, SearchTrial, TrialTask, run_pickled_trial

TRIES = 3  # of a trial that the scheduler lost; dask itself tries those of workers that die


def run_on_client(
    client: Any, task: TrialTask, proposals: Iterable[Proposal], finished: Callable[[SearchTrial], None]
) -> None:
    """Run `run_trial(task, proposal)` for each of the proposals; `finished` is called with every
    result as it comes.

    The scheduler has the task with every trial, so nothing is lost with a worker. Raises BadInput
    if the task cannot be pickled, and what a trial raises.
    """
    from distributed import as_completed
    from distributed.comm.core import CommClosedError
    from distributed.scheduler import KilledWorker

    lost = (CommClosedError, *_cancelled_errors())
    data, run = _pickled(task), uuid4().hex[:8]
    futures: dict[Any, Proposal] = {}
    tries: Counter[int] = Counter()

    def submit(proposal: Proposal) -> Any:
        number = proposal.number
        tries[number] += 1
        key = f"demask-trial-{run}-{number}-{tries[number]}"
        future = client.submit(run_pickled_trial, data, proposal, key=key, pure=False)
        futures[future] = proposal
        return future

    try:
        pool = as_completed([submit(proposal) for proposal in proposals])
        for future in pool:
            proposal = futures.pop(future)
            try:
                finished(future.result())
            except KilledWorker as error:  # dask has tried it on several
                raise DemaskError(
                    f"trial {proposal.number} killed its workers ({error}): do they have too "
                    "little memory? Finished trials are in the storage"
                ) from error
            except lost:
                if tries[proposal.number] == TRIES:
                    raise
                pool.add(submit(proposal))
    finally:
        client.cancel(list(futures))


def _cancelled_errors() -> tuple[type[BaseException], ...]:
    """What a future raises whose task the scheduler lost, by the versions of distributed."""
    from asyncio import CancelledError

    import distributed
    from distributed import client

    named = (distributed.CancelledError, getattr(client, "FutureCancelledError", CancelledError))
    return (CancelledError, *named)


def _pickled(task: TrialTask) -> bytes:
    import cloudpickle  # which distributed brings: functions of notebooks, too

    try:
        return cloudpickle.dumps(task)
    except Exception as error:
        raise BadInput(
            f"the model, evaluate or recover cannot be sent to workers ({error}): leave open "
            "files, locks and generators out of them"
        ) from error
