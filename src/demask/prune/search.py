"""search(): amounts for every group, by accuracy and cost.

Trials may run on the workers of a `dask.distributed` client; those of a worker that dies run again. They
are stored in a file that a killed process leaves complete.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from demask.errors import BadInput, DemaskError
from demask.failures import described, public
from demask.files.atomic_write import check_writable
from demask.graph.capture.shared_captures import share_captures
from demask.installation import install_command
from demask.pages import Curve, Lines, OnPage, Page, PageSource, StepCharts, TextTable
from demask.progress import progress
from demask.prune.masked_copies import PerGroup, PredictedTime, PruningOptions, pruner_of_copy
from demask.prune.plots import COSTS, draw_search
from demask.prune.pruner import Pruner
from demask.prune.scores import L1
from demask.prune.trial import (
    Proposal,
    SearchTrial,
    TrialTask,
    cost_of,
    mix,
    propose,
    quiet_optuna,
    run_pickled_trial,
    run_trial,
)

JOURNALS, DATABASES = (".journal", ".log"), (".db", ".sqlite", ".sqlite3")
JOURNAL_START = b'{"op_code"'
STUDY, IDENTITY, TRIAL = "demask prune", "demask search", "demask trial"  # names in the file


class TrialStore:
    """An Optuna study that holds finished trials alone: each is added at once, complete.

    What ran when a process was killed is not in it, and runs again.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]):
        """Open or create the study.

        path: a journal (.journal, .log) or an SQLite database (.db, .sqlite, .sqlite3); None for
        memory. identity: JSON values that say which search this is. Raises BadInput for a file of
        another search, or that holds something else.
        """
        self.cost, self.budget = str(identity["cost"]), identity["budget"]
        directions = ["maximize", "minimize"] if self.budget is None else ["maximize"]
        with quiet_optuna() as optuna:
            self._optuna = optuna
            try:
                self._open_storage = None if path is None else _open_storage(optuna, path)
                self._open_study = _open_study(optuna, self._open_storage, directions)
            except BadInput:
                raise
            except Exception as error:  # of SQLAlchemy, JSON or Optuna: not such a file
                raise _not_of_a_search(path or Path(), described(error)) from error
        stored = self._open_study.user_attrs.get(IDENTITY)
        if stored is None:
            self._open_study.set_user_attr(IDENTITY, dict(identity))
        elif stored != identity:
            names = [name for name in identity if stored.get(name) != identity[name]]
            raise BadInput(
                f"{path} is of another search ({', '.join(names)} differ): give another "
                "file, or the arguments of that search"
            )

    def trials(self) -> dict[int, SearchTrial]:
        """The finished trials by number; of two with one number, the first."""
        trials: dict[int, SearchTrial] = {}
        for stored in self._open_study.get_trials(deepcopy=False):
            values = stored.user_attrs.get(TRIAL)
            if values is not None:
                trials.setdefault(values["number"], SearchTrial(**values))
        return trials

    def add(self, trial: SearchTrial) -> None:
        """Add a finished trial."""
        optuna = self._optuna
        fits = trial.accuracy is not None
        values = [trial.accuracy, *([] if self.budget else [cost_of(self.cost, trial)])]
        most = {name: max(n, 1) for name, n in trial.removed.items()}
        space = {name: optuna.distributions.IntDistribution(0, n) for name, n in most.items()}
        state = optuna.trial.TrialState
        self._open_study.add_trial(
            optuna.trial.create_trial(
                state=state.COMPLETE if fits else state.PRUNED,
                values=values if fits else None,
                params=dict(trial.removed),
                distributions=space,
                user_attrs={TRIAL: asdict(trial)},
            )
        )

    def remember(self, name: str, values: dict[str, Any]) -> None:
        """Store JSON values by name."""
        self._open_study.set_user_attr(name, values)

    def recall(self, name: str) -> dict[str, Any] | None:
        """The values stored by name, or None."""
        return self._open_study.user_attrs.get(name)

    def close(self) -> None:
        """Close the connection to a database."""
        engine = getattr(getattr(self._open_storage, "_backend", self._open_storage), "engine", None)
        if engine is not None:
            engine.dispose()


def _open_study(optuna: Any, storage: Any, directions: list[str]) -> Any:
    """The stored study, or a new one."""
    if storage is not None:
        try:
            return optuna.load_study(study_name=STUDY, storage=storage)
        except KeyError:  # a new file
            pass
    return optuna.create_study(study_name=STUDY, storage=storage, directions=directions)


def _open_storage(optuna: Any, path: Path) -> Any:
    final = check_writable(path)
    if final.suffix in DATABASES:
        _check_database(final, path)
        return optuna.storages.RDBStorage(f"sqlite:///{final}")
    if final.suffix not in JOURNALS:
        known = ", ".join((*JOURNALS, *DATABASES))
        raise BadInput(f"expected a storage that ends in {known}, got {path}")
    if final.exists():
        _check_journal(final, path)
        _drop_broken_line(final)
    backend = optuna.storages.journal.JournalFileBackend(str(final))
    return optuna.storages.JournalStorage(backend)


def _check_database(final: Path, path: Path) -> None:
    """Raise BadInput for an existing file that is no database, or one of other tables alone."""
    if not final.exists() or not final.stat().st_size:
        return
    try:
        with closing(sqlite3.connect(f"{final.as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("select name from sqlite_master where type = 'table'")
            tables = {name for (name,) in rows}
    except sqlite3.Error as error:
        raise _not_of_a_search(path, str(error)) from error
    if tables and "studies" not in tables:
        raise _not_of_a_search(path, f"it has the tables {', '.join(sorted(tables)[:3])}")


def _check_journal(final: Path, path: Path) -> None:
    with final.open("rb") as file:
        start = file.read(len(JOURNAL_START))
    if not JOURNAL_START.startswith(start):
        raise _not_of_a_search(path, f"it starts with {start[:20]!r}")


def _not_of_a_search(path: Path, reason: str) -> BadInput:
    return BadInput(f"cannot read {path} as the trials of a search ({reason}); give another file")


def _drop_broken_line(path: Path) -> None:
    """Cut off a last line without its end: that of a process killed while it wrote. Optuna would
    write the next line after it, and read neither."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        length = min(size, 1 << 24)
        file.seek(size - length)
        file.truncate(size - length + file.read().rfind(b"\n") + 1)


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
    data, run = _pickle(task), uuid4().hex[:8]
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


def _pickle(task: TrialTask) -> bytes:
    import cloudpickle  # which distributed brings: functions of notebooks, too

    try:
        return cloudpickle.dumps(task)
    except Exception as error:
        raise BadInput(
            f"the model, evaluate or recover cannot be sent to workers ({error}): leave open "
            "files, locks and generators out of them"
        ) from error


DENSE = "demask dense"  # what the storage calls the network as it is
SHOWN = 12  # trials in the table


@dataclass(frozen=True, slots=True)
class Search(PageSource):
    """The trials of a search.

    It prints as a table; `to_html` and notebooks show all trials, and a chart.

    Attributes:
        dense: the network as it is, as a trial of number -1.
        trials: all trials, in order.
        cost, budget: as `search` was called.
        options: structure, score and skip of the pruners.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.ones(1, 4)
        >>> result = prune.search(net, lambda net: -net(x).norm().item(), (x,), trials=3, budget=30)
        >>> result.best.macs <= 30
        True
    """

    dense: SearchTrial
    trials: tuple[SearchTrial, ...]
    cost: str
    budget: float | None
    options: PruningOptions

    @property
    def front(self) -> tuple[SearchTrial, ...]:
        """The trials that no other beats: none is as good and cheaper, or better for the cost."""
        front: list[SearchTrial] = []
        evaluated = [trial for trial in self.trials if trial.accuracy is not None]
        for trial in sorted(evaluated, key=lambda t: (self.cost_of(t), -(t.accuracy or 0))):
            if not front or (trial.accuracy or 0) > (front[-1].accuracy or 0):
                front.append(trial)
        return tuple(front)

    @property
    def best(self) -> SearchTrial:
        """The trial of the highest accuracy, of equal ones the cheapest. Raises BadInput if none
        fits the budget."""
        if not self.front:
            least = min(map(self.cost_of, self.trials), default=float("nan"))
            raise BadInput(
                f"no trial fits the budget of {self.budget:g}: the cheapest of "
                f"{len(self.trials)} costs {least:g}; allow larger amounts, or more "
                "trials"
            )
        return self.front[-1]

    def cost_of(self, trial: SearchTrial) -> float:
        """The MACs, milliseconds or parameters of a trial, as `cost` says."""
        return cost_of(self.cost, trial)

    def pruner(self, model: nn.Module, example_inputs: Any, trial: SearchTrial | None = None) -> Pruner:
        """A `Pruner` that masked `model`, in place, as `trial` says (default: the best)."""
        trial = trial or self.best
        pruner = Pruner(
            model,
            example_inputs,
            score=self.options.score,
            structure=self.options.structure,
            skip=self.options.skip,
            allocation=PerGroup(trial.removed),
        )
        pruner.step()
        return pruner

    def to_dict(self) -> dict[str, Any]:
        """The trials in JSON types."""
        return {
            "cost": self.cost,
            "budget": self.budget,
            "dense": asdict(self.dense),
            "trials": [asdict(trial) for trial in self.trials],
            "front": [trial.number for trial in self.front],
        }

    def plot(self, path: str | Path) -> None:
        """Write a picture to `path` (.svg, .png or .pdf): accuracy by cost of all trials. Raises
        BadInput without matplotlib (extra `plot`)."""
        draw_search(self, Path(path))

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        front, head = self.front, ("trial", "accuracy", "parameters", "MACs", "ms", "removed")
        over = sum(trial.accuracy is None for trial in self.trials)
        words = f"{len(self.trials)} trials; {len(front)} that no other beats"
        words += f"; {over} over the budget, not evaluated" if over else ""
        points = [(self.cost_of(trial), trial.accuracy or 0.0) for trial in front]
        chart = StepCharts(
            [Curve("accuracy", points, True)],
            self.cost_of(self.dense),
            heading="Accuracy by cost",
            across=COSTS[self.cost],
        )
        best = [
            (name, f"{count:,}", f"{100 * front[-1].amounts[name]:.0f} %")
            for name, count in (front[-1].removed if front else {}).items()
        ]
        return Page(
            "demask search",
            (
                TextTable(
                    head,
                    [*map(_row_cells, [self.dense, *front])],
                    "Networks that no other beats",
                    terminal_rows=[*map(_row_cells, [self.dense, *front[-SHOWN:]])],
                ),
                Lines([f"{words}. Removed: mean share of a group's slices."], is_wrapped=True, is_close=True),
                OnPage(
                    [
                        chart,
                        TextTable(("group", "slices removed", "share"), best, "The best network"),
                        TextTable(head, [*map(_row_cells, self.trials)], "All trials"),
                    ]
                ),
            ),
        )


def _row_cells(trial: SearchTrial) -> tuple[str, ...]:
    """A row of a table; without accuracy where the network was not evaluated."""
    mean = sum(trial.amounts.values()) / max(len(trial.amounts), 1)
    accuracy = "–" if trial.accuracy is None else f"{trial.accuracy:.4g}"
    milliseconds = "–" if trial.milliseconds is None else f"{trial.milliseconds:.3g}"
    return (
        "as it is" if trial.number < 0 else str(trial.number),
        accuracy,
        f"{trial.parameters:,}",
        f"{trial.macs:,}",
        milliseconds,
        f"{100 * mean:.0f} %",
    )


@public
def search(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    example_inputs: Any,
    *,
    trials: int = 50,
    amounts: tuple[float, float] = (0.0, 0.9),
    cost: str = "macs",
    budget: float | None = None,
    structure: str = "channel",
    score: Any = None,
    skip: Iterable[str] = (),
    recover: Callable[[nn.Module], Any] | None = None,
    storage: str | Path | None = None,
    client: Any = None,
    batch: int = 4,
    seed: int = 0,
) -> Search:
    """Networks with other amounts of slices removed from each group: accuracy against cost.

    Each trial masks the least important slices of every group in a copy, measures what `demask`
    removes, and evaluates the copy. The first trials have the same amount in all groups; Optuna
    (extra `search`) proposes the others. `model` does not change.

    A trial is a function of the network and its amounts, and proposals are a function of the trials
    before: for one seed the result is the same on any number of workers, after a worker died, and
    after the process was killed and started again with the same storage.

    Args:
        model: an `nn.Module`, trained.
        evaluate: takes a network in eval mode and returns a number, higher for a better network.
        example_inputs: as of `Pruner`; MACs and milliseconds are those of one call on them.
        trials: of the search in all; those in the storage count.
        amounts: the least and the largest share of a group's slices. Default: (0.0, 0.9).
        cost: "macs" (default), "parameters", or "ms": predicted from layers measured here, so that
            another run may propose other amounts.
        budget: the most that a network may cost: a number of MACs, milliseconds or parameters.
            Networks over it are not evaluated. Default: None, for both accuracy and cost.
        structure, score, skip: as of `Pruner`. Default: channels by L1.
        recover: called with each copy before it is evaluated; it may train it. Default: None.
        storage: a file for the trials: a journal (.journal, .log) or an SQLite database (.db,
            .sqlite). An existing one is continued. Default: None, for memory.
        client: a `distributed.Client`, on whose workers trials run. Workers need demask and what
            `evaluate` imports. Default: None, for one trial after the other, here.
        batch: trials that are proposed at once, from those before; as many can run at a time.
        seed: of the proposals and of torch in trials.

    Returns:
        A `Search`: `best`, `front`, all `trials`; `pruner` prunes a network so.

    Raises:
        BadInput: an argument out of range, a storage of another search, Optuna is not installed, or
            `evaluate` raises or returns no finite number. Finished trials stay in the storage.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.ones(1, 4)
        >>> result = prune.search(net, lambda net: -net(x).norm().item(), (x,), trials=3)
        >>> [trial.removed for trial in result.trials]
        [{'0': 2}, {'0': 4}, {'0': 5}]
    """
    _check_options(trials, batch, amounts, cost, budget)
    if seed < 0:
        raise BadInput(f"expected a seed of 0 or more, got {seed}")
    _check_installed(client)
    options = PruningOptions(score or L1(), structure, skip if isinstance(skip, str) else [*skip])
    task = TrialTask(model, evaluate, example_inputs, options, recover, cost, budget, torch.get_num_threads())
    pruner = pruner_of_copy(model, example_inputs, options)
    sizes = {candidates.name: candidates.units for candidates in pruner.candidates}
    ranges = {n: (int(amounts[0] * k), min(int(amounts[1] * k), k - 1)) for n, k in sizes.items()}
    if not any(most for _, most in ranges.values()):
        raise BadInput(
            f"expected amounts of one {structure} or more, got {amounts} of groups of {sorted(set(sizes.values()))}"
        )
    identity = _storage_identity(task, sizes) | {"amounts": list(amounts), "seed": seed, "batch": batch}
    store = TrialStore(None if storage is None else Path(storage), identity)
    with closing(store), share_captures():  # copies differ in the values of weights alone
        time = PredictedTime(pruner) if cost == "ms" else None
        dense = _measure_dense(store, task, time)
        run = _Run(task, store, ranges, sizes, client, seed, time)
        if budget is not None and cost != "ms":
            run.check_budget()
        done = run.until(trials, batch)
    return Search(dense, tuple(done[number] for number in range(trials)), cost, budget, options)


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs the trials that the store lacks, a batch after the other."""

    task: TrialTask
    store: TrialStore
    ranges: Mapping[str, tuple[int, int]]
    sizes: Mapping[str, int]
    client: Any
    seed: int
    time: PredictedTime | None

    def check_budget(self) -> None:
        """Raise BadInput for a budget of parameters or MACs that no network can fit: not even the
        one without all slices that may be removed."""
        most = self._next_proposal(0, {name: largest for name, (_, largest) in self.ranges.items()})
        least = cost_of(self.task.cost, run_trial(replace(self.task, budget=0.0), most))
        if self.task.budget is not None and least > self.task.budget:
            raise BadInput(
                f"no network fits the budget of {self.task.budget:g} {self.task.cost}: "
                f"with the largest amounts of all groups removed, {least:g} are left; "
                "give larger amounts, or a larger budget"
            )

    def until(self, count: int, batch: int) -> dict[int, SearchTrial]:
        """The trials by number, at least `count`; see `search`."""
        done = self.store.trials()
        with progress("search", count) as step:
            step("search", sum(number < count for number in done))

            def finished(trial: SearchTrial) -> None:
                self.store.add(trial)
                done[trial.number] = trial
                step(f"trial {trial.number}")

            for start in range(0, count, batch):
                numbers = range(start, start + batch)  # all: proposals depend on their batch
                if any(number not in done for number in numbers if number < count):
                    self._run_batch([n for n in numbers if n < count], numbers, done, finished)
        return done

    def _run_batch(
        self,
        wanted: list[int],
        numbers: range,
        done: Mapping[int, SearchTrial],
        finished: Callable[[SearchTrial], None],
    ) -> None:
        history = [done[number] for number in range(numbers.start)]
        proposals = propose(self.ranges, history, numbers, cost=self.task.cost, budget=self.task.budget, seed=self.seed)
        tasks = [
            self._next_proposal(number, removed)
            for number, removed in zip(numbers, proposals, strict=True)
            if number in wanted and number not in done
        ]
        if self.client is not None:
            return run_on_client(self.client, self.task, tasks, finished)
        for proposal in tasks:
            finished(run_trial(self.task, proposal))
        return None

    def _next_proposal(self, number: int, removed: Mapping[str, int]) -> Proposal:
        amounts = {name: n / self.sizes[name] for name, n in removed.items()}
        milliseconds = None if self.time is None else self.time.milliseconds(removed)
        return Proposal(number, removed, amounts, milliseconds, mix(self.seed, number))


def _measure_dense(store: TrialStore, task: TrialTask, time: PredictedTime | None) -> SearchTrial:
    """The network as it is, without a budget; measured once for each storage."""
    values = store.recall(DENSE)
    if values is None:
        free = TrialTask(
            task.model, task.evaluate, task.example_inputs, task.options, None, task.cost, None, task.threads
        )
        milliseconds = None if time is None else time.milliseconds({})
        values = asdict(run_trial(free, Proposal(-1, {}, {}, milliseconds, 0)))
        store.remember(DENSE, values)
    return SearchTrial(**values)


def _check_options(trials: int, batch: int, amounts: tuple[float, float], cost: str, budget: float | None) -> None:
    if trials < 1 or batch < 1:
        raise BadInput(f"expected trials and batch of 1 or more, got {trials} and {batch}")
    if len(amounts) != 2 or not 0 <= amounts[0] <= amounts[1] < 1:
        raise BadInput(f"expected amounts (least, largest) from 0 to below 1, got {amounts}")
    if cost not in COSTS:
        raise BadInput(f"expected cost to be one of {', '.join(COSTS)}, got {cost!r}")
    if budget is not None and not budget > 0:
        raise BadInput(f"expected a budget above 0, in {cost}, got {budget!r}")


def _check_installed(client: Any) -> None:
    if client is not None and not (hasattr(client, "submit") and hasattr(client, "cancel")):
        raise BadInput(
            f"expected client to be a distributed.Client, got {client!r:.60}: "
            "distributed.Client(address) connects to workers"
        )
    for name in ("optuna", *(("distributed", "cloudpickle") if client is not None else ())):
        try:
            import_module(name)
        except ImportError as error:
            raise BadInput(f"search needs {name} ({error}): {install_command('search')}") from error


def _storage_identity(task: TrialTask, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a storage must have been created with, in JSON values."""
    digest = hashlib.sha256(type(task.model).__qualname__.encode())
    for name, tensor in task.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    score = task.options.score
    return {
        "model": digest.hexdigest(),
        "groups": dict(sizes),
        "structure": task.options.structure,
        "score": getattr(score, "__qualname__", None) or repr(score),
        "skip": list(task.options.skip),
        "cost": task.cost,
        "budget": task.budget,
    }
